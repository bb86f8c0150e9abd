"""Times of single kernels on an otherwise idle device: products, attention, experts, collectives inside a node."""

from meshwright.planner.kernels.kernel_operations import Collective, Decode, FusedExperts, Operation, Prefill, Product
from meshwright.planner.kernels.one_kernel import kernel_seconds

__all__ = ["Collective", "Decode", "FusedExperts", "Operation", "Prefill", "Product", "kernel_seconds"]
