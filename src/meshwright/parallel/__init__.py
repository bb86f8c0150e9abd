"""The same model over devices, applied from outside.

mesh, group      a layout's ranks, and the collectives of each axis
apply            how a layout is put onto a model, in order; the file to read first
data, replicas   ZeRO-1 to 3 by fully_shard; ZeRO-0
tensor, column_parallel, row_parallel, sequence     tp and sp
context, ring    cp: which rank holds which positions; how keys travel
expert, row_exchange         ep: tokens to their experts and back
pipeline, passes, p2p        pp: one executor for all schedules
recompute, offload, saved_tensors     which activations are kept, and where
compiling, operators, pass_graphs, graph_capture     torch.compile and CUDA graphs
engine           the whole, as a training step calls it
health           ranks that die or hang
"""

from meshwright.parallel.apply import apply_block_call, build_engine, on_one_device, parallelize
from meshwright.parallel.engine import Engine
from meshwright.parallel.mesh import Mesh, make_mesh

__all__ = ["Engine", "Mesh", "apply_block_call", "build_engine", "make_mesh", "on_one_device", "parallelize"]
