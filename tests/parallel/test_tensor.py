"""What tensor and sequence parallelism keep between the passes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.observe.ranks import on_ranks
from meshwright.observe.tiny import shrink
from meshwright.parallel import build_engine
from meshwright.spec import Layout, ModelShape

ROWS, SEQUENCE = 2, 32


def kept_bytes(shape: ModelShape, options: list[dict[str, object]]) -> list[int]:
    """Of each layout, what one block keeps for its backward pass: storages that are neither parameters nor tables."""
    found = []
    for each in options:
        layout = Layout(compile="off", **each)  # type: ignore[arg-type]
        model = build_engine(shape, layout).model
        positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
        sights = model.sights(positions, SEQUENCE, None)
        block = next(iter(model.layers.values()))
        sight = sights[block.window]
        known = {p.data_ptr() for p in model.parameters()}
        known |= {t.data_ptr() for t in (sight.cos, sight.sin) if t is not None}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, known: set[int] = known, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        slices = layout.tp if layout.sp else 1
        x = torch.randn(ROWS, SEQUENCE // slices, shape.hidden, requires_grad=True)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = block(x, sight)
            found.append(sum(kept.values()))
        out.sum().backward()
    return found


@pytest.mark.parametrize(("kind", "t"), [("llama-3.1-8b", 4), ("gpt2-124m", 2)])
def test_sequence_parallelism_keeps_a_part_of_every_activation(kind: str, t: int) -> None:
    """Korthikanti et al. 2022, section 4.2.2: all activations of a block are divided by t, the products' inputs too."""
    shape = replace(shrink(kind), hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64)
    (whole,) = kept_bytes(shape, [{}])
    for split, unsplit in on_ranks(t, kept_bytes, shape, [{"tp": t, "sp": True}, {"tp": t}]):
        assert split * t == whole < unsplit * t
