"""Times of single kernels on an otherwise idle device: products, attention, experts, collectives inside a node."""

from meshwright.planner.kernels.one_kernel import kernel_seconds
from meshwright.planner.kernels.operations import Collective, Decode, FusedExperts, Operation, Prefill, Product

__all__ = ["Collective", "Decode", "FusedExperts", "Operation", "Prefill", "Product", "kernel_seconds"]
