"""The same model over devices, applied from outside."""

from meshwright.parallel.apply import apply_block_call, build_engine, on_one_device, parallelize
from meshwright.parallel.engine import Engine
from meshwright.parallel.mesh import Mesh, make_mesh

__all__ = ["Engine", "Mesh", "apply_block_call", "build_engine", "make_mesh", "on_one_device", "parallelize"]
