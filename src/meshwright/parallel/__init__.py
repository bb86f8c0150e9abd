"""The same model over devices, applied from outside."""

from meshwright.parallel.apply import parallelize

__all__ = ["parallelize"]
