"""Memory that a rank really holds for parameters, gradients and optimizer states, summed over its tensors.

spec/memory/held.py computes the same from shape and layout alone; a test compares them to the byte.
"""

from collections.abc import Iterable

from torch import Tensor

from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel import Engine
from meshwright.parallel.zero.data import local
from meshwright.training.optimizer.optimizer import Optimizer


def memory(engine: Engine, optimizer: Optimizer, teacher: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes of each kind (spec.ledger.STATES) at this moment, without empty kinds.

    Tensors that share memory count once. `teacher`: its parameters.
    """
    seen: set[int] = set()
    sizes = {kind: _bytes(tensors, seen) for kind, tensors in tensors_by_kind(engine, optimizer).items()}
    sizes["parameters"] += _bytes(teacher, seen)
    return {kind: size for kind, size in sizes.items() if size}


def tensors_by_kind(engine: Engine, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors of each kind (spec.ledger.STATES) as they are now."""
    parameters, shards = engine.parameters.values(), optimizer.parameters.values()
    states = optimizer.tensors()
    return {
        "parameters": [*parameters, *codes(engine)],
        "shards": [*shards, *optimizer.frozen],
        "gradients": [p.grad for p in (*parameters, *shards) if p.grad is not None],
        "masters": [t for name, t in states.items() if name.startswith("master.")],
        "moments": [t for name, t in states.items() if name.startswith("moment")],
        "counters": [t for name, t in states.items() if name.startswith("step.")],
    }


def codes(engine: Engine) -> list[Tensor]:
    """Return the tensors of frozen matrices that are stored as codes and scales."""
    matrices = frozen_codes(engine.stages, engine.model.shape).values()
    return [tensor for matrix in matrices for tensor in (*matrix.buffers(), *matrix.parameters())]


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the size of the storages behind tensors that are not in `seen`. Padding is part of a storage."""
    total = 0
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
