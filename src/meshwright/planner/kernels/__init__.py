"""Times of single kernels on an otherwise idle device: products, attention, experts, collectives inside a node."""

from meshwright.planner.kernels.fitted_kernel import kernel_seconds
from meshwright.planner.kernels.kernel_operations import Collective, Decode, FusedExperts, Operation, Prefill, Product

__all__ = ["Collective", "Decode", "FusedExperts", "Operation", "Prefill", "Product", "kernel_seconds"]
