"""The same model over devices, applied from outside.

apply            how a layout is put onto a model, in order; the file to read first
engine           the whole, as a training step calls it
groups           a layout's ranks, the collectives of each axis, and agreements
axes             inside a layer: ZeRO, tp and sp, cp (which rank holds which positions; how keys travel), ep
pipeline         one executor for all schedules; passes, and their CUDA graphs
blocks           torch.compile; which activations are kept, and where
health           ranks that die or hang
"""

from meshwright.parallel.apply import apply_block_call, build_engine, on_one_device, parallelize
from meshwright.parallel.engine import Engine
from meshwright.parallel.groups.mesh import Mesh, make_mesh

__all__ = ["Engine", "Mesh", "apply_block_call", "build_engine", "make_mesh", "on_one_device", "parallelize"]
