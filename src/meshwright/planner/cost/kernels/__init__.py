"""Times of single kernels on an otherwise idle device: products, attention, experts, collectives inside a node."""

from meshwright.planner.cost.kernels.times import Collective, Decode, Experts, Operation, Prefill, kernel_seconds

__all__ = ["Collective", "Decode", "Experts", "Operation", "Prefill", "kernel_seconds"]
