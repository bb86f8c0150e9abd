"""What a rank really keeps of parameters, gradients and optimizer states: the memory of its tensors, summed.

The counting of the same from shape and layout alone is spec/held.py; a test holds them together to the byte.
"""

from collections.abc import Iterable

from torch import Tensor

from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel import Engine
from meshwright.parallel.data import local
from meshwright.training.optimizer import Optimizer


def memory(engine: Engine, optimizer: Optimizer, beside: Iterable[Tensor] = ()) -> dict[str, int]:
    """Bytes by kind (spec.ledger.STATES) at this moment, without those that have nothing. Tensors that share memory
    count once. `beside`: parameters of a teacher."""
    seen: set[int] = set()
    sizes = {kind: _bytes(tensors, seen) for kind, tensors in kept(engine, optimizer).items()}
    sizes["parameters"] += _bytes(beside, seen)
    return {kind: size for kind, size in sizes.items() if size}


def kept(engine: Engine, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """The tensors of each kind (spec.ledger.STATES) as they are now."""
    now, own = engine.parameters.values(), optimizer.parameters.values()
    states = optimizer.tensors()
    return {
        "parameters": [*now, *codes(engine)],
        "shards": [*own, *optimizer.frozen],
        "gradients": [p.grad for p in (*now, *own) if p.grad is not None],
        "masters": [t for name, t in states.items() if name.startswith("master.")],
        "moments": [t for name, t in states.items() if name.startswith("moment")],
        "counters": [t for name, t in states.items() if name.startswith("step.")],
    }


def codes(engine: Engine) -> list[Tensor]:
    """Of frozen matrices that are codes and scales."""
    held = frozen_codes(engine.stages, engine.model.shape)
    return [tensor for one in held.values() for tensor in (*one.buffers(), *one.parameters())]


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Of the storages behind tensors that are not in `seen`; padding is part of a storage."""
    total = 0
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
