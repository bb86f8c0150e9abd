"""Context parallelism against one device that holds the whole sequence: places, masks, attention, models, bytes kept
and sent."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.data import Sequences
from meshwright.kernels.attention import partial
from meshwright.kernels.attention.attend import Mask, attend_reference, causal_mask
from meshwright.kernels.c import sequence_attention, training_rows
from meshwright.model import Transformer, build
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.axes import ring
from meshwright.parallel.axes.context import ContextMask, Places, mask_maker, places, take_at
from meshwright.parallel.axes.ring import ROUTES, context_attend
from meshwright.parallel.blocks.recompute import block_call
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.spec import Layout, MLAShape, ModelShape
from meshwright.spec.errors import IllegalLayout
from meshwright.training.step.batches import Share, to_batch
from meshwright.training.step.batches import split as split_batch
from tests.kernels.exactness import FUSED_ATTENTION, plain_attention

BATCH, SEQUENCE, SCALE = 2, 144, 0.3
"""Chunks of 36 or 18 positions on 2 and 4 ranks: no whole number of tiles."""


SPLITS = ("zigzag", "striped", "chunks")


def alone(size: int, index: int) -> Group:
    """A place among ranks that never talk."""
    return Group("cp", tuple(range(size)), index)


def local_positions(sequence: int, size: int, index: int, split: str) -> Tensor:
    """Positions (S / c,) that rank `index` of `size` holds, ascending."""
    return places(sequence, size, index, split).positions(0, sequence // size)


def take(x: Tensor, group: Group, split: str) -> Tensor:
    """A rank's positions of x (B, S, ...) -> (B, S / c, ...)."""
    return take_at(x, places(x.shape[1], group.size, group.index, split), 1)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_part_the_sequence(size: int, split: str) -> None:
    held = [local_positions(16, size, index, split) for index in range(size)]
    assert sorted(torch.cat(held).tolist()) == list(range(16))
    assert all(positions.diff().gt(0).all() for positions in held)
    x = torch.arange(32).view(2, 16)
    for index, positions in enumerate(held):
        assert torch.equal(take(x, alone(size, index), split), x[:, positions])


def test_zigzag_gives_a_chunk_from_each_end() -> None:
    assert local_positions(16, 4, 1, "zigzag").tolist() == [2, 3, 12, 13]
    assert local_positions(16, 4, 1, "chunks").tolist() == [4, 5, 6, 7]
    assert local_positions(16, 4, 1, "striped").tolist() == [1, 5, 9, 13]


def test_what_cannot_be_cut_is_refused_with_a_sentence() -> None:
    with pytest.raises(IllegalLayout, match=r"recipe.sequence=20 .* 2 x layout.cp=4 chunks .*take recipe.sequence=16"):
        local_positions(20, 4, 0, "zigzag")
    with pytest.raises(IllegalLayout, match=r"recipe.sequence=21 .* layout.cp=4 chunks: take recipe.sequence=20"):
        local_positions(21, 4, 0, "chunks")
    assert local_positions(20, 4, 0, "chunks").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(IllegalLayout, match=r"context_split=True is unknown: take one of zigzag, striped, chunks"):
        places(16, 4, 0, True)  # type: ignore[arg-type]  # what an untyped caller may give


def test_past_keys_are_refused() -> None:
    with pytest.raises(IllegalLayout, match=r"1 queries of 9 positions: layout.cp=2 .*layout.cp=1"):
        mask_maker(alone(2, 0), "zigzag")(1, 9)


def context_mask(size: int, index: int, split: str, **options: Any) -> ContextMask:
    mask = mask_maker(alone(size, index), split)(SEQUENCE // size, SEQUENCE // size, **options)
    assert isinstance(mask, ContextMask)
    return mask


def seen(tiles: Any, queries: int, keys: int) -> Tensor:
    """(queries, keys): how often a pair is computed and counts."""
    counts = torch.zeros(queries, keys, dtype=torch.int64)
    for tile in tiles:
        part = torch.ones(tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start, dtype=torch.int64)
        for columns, hidden in tile.hidden:
            part[:, columns] *= ~hidden.view(len(part), -1)
        part = part * in_band(*part.shape, tile.left, tile.right)
        assert tile.hidden or part.any(1).all()  # a GPU's kernel has no log-sum-exp of a query that sees nothing
        counts[tile.queries, tile.keys] += part
    return counts


def in_band(queries: int, keys: int, left: int, right: int) -> Tensor:
    """Pairs (S, T) by the sentence of flash-attn 2.8 (flash_attn_func, `window_size`): query i sees the keys from
    i + seqlen_k - seqlen_q - window_size[0] to i + seqlen_k - seqlen_q + window_size[1], -1 being no border."""
    at, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    return ((key >= at - left) | (left < 0)) & ((key <= at + right) | (right < 0))


@pytest.mark.parametrize("window", [0, 1, 7, 40, 100])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_are_the_mask_of_one_device(size: int, split: str, window: int) -> None:
    whole = causal_mask(SEQUENCE, SEQUENCE, window=window).allowed(SEQUENCE, SEQUENCE, torch.device("cpu"))[0, 0]
    for index, other in itertools.product(range(size), range(size)):
        mask = context_mask(size, index, split, window=window)
        mine, theirs = (local_positions(SEQUENCE, size, rank, split) for rank in (index, other))
        expected = whole[mine][:, theirs].long()
        for rows in (1, 5, 64):
            tiles = mask.blocks(mask.keys_of(size, other), rows)
            assert torch.equal(seen(tiles, len(mine), len(theirs)), expected)
        for rows in (0, 1, 7) if window else (0,):
            tiles = mask.chunks(mask.keys_of(size, other), rows)
            assert torch.equal(seen(tiles, len(mine), len(theirs)), expected)
        whole_keys = Places((0,), SEQUENCE)  # as they are gathered
        if split != "striped":
            assert torch.equal(seen(mask.chunks(whole_keys), len(mine), SEQUENCE), whole[mine].long())


@pytest.mark.parametrize("window", [0, 1, 11, 50])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_of_documents_need_no_mask_and_are_that_of_one_device(
    size: int, split: str, share: float, window: int
) -> None:
    draw = torch.Generator().manual_seed(size)
    documents = (torch.rand(BATCH, SEQUENCE, generator=draw) < share).int().cumsum(1)
    told = causal_mask(SEQUENCE, SEQUENCE, documents=documents, window=window)
    whole = told.allowed(SEQUENCE, SEQUENCE, torch.device("cpu"))
    begins = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    begins[:, 1:] = documents.diff(dim=1) != 0
    first = torch.arange(SEQUENCE).where(begins, 0).cummax(1).values
    for index, other in itertools.product(range(size), range(size)):
        mine, theirs = (local_positions(SEQUENCE, size, rank, split) for rank in (index, other))
        at = places(SEQUENCE, size, index, split)
        mask = ContextMask.make(alone(size, index), at, split, torch.device("cpu"), first[:, mine], window)
        tiles = list(mask.chunks(mask.keys_of(size, other)))
        assert not any(tile.hidden for tile in tiles)
        for row in range(BATCH):
            of_row = [tile for tile in tiles if row in range(BATCH)[tile.rows]]
            assert torch.equal(seen(of_row, len(mine), len(theirs)), whole[row, 0][mine][:, theirs].long())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_mask_of_packed_documents_waits_for_no_device(split: str, seed: int) -> None:
    """Where documents begin is known where rows are read: nothing is gathered (these ranks cannot talk), and no value
    of a tensor is looked at: the documents are meta tensors, which have none."""
    draw = torch.Generator().manual_seed(seed)
    rows = (torch.rand(BATCH, SEQUENCE, generator=draw) < 0.1 / seed).int().cumsum(1).numpy()
    read = Sequences(tokens=rows, targets=rows, documents=rows, positions=rows, packed=True)
    for index, window in itertools.product(range(4), (0, 20)):
        columns = tuple(local_positions(SEQUENCE, 4, index, split).tolist())
        batch = to_batch(read, torch.device("cpu"), document_mask=True, share=Share(columns=columns), rows=BATCH + 1)
        part = split_batch(batch, 2)[0]
        unseen = torch.empty(BATCH, SEQUENCE // 4, dtype=torch.int32, device="meta")
        mask = mask_maker(alone(4, index), split)(
            SEQUENCE // 4, SEQUENCE // 4, window=window, documents=unseen, spans=part.spans
        )
        assert isinstance(mask, ContextMask)
        right = [
            [max(int((row == row[at]).argmax()), at - window + 1 if window else 0) for at in columns] for row in rows
        ]
        firsts = mask.firsts()
        assert firsts is not None and firsts.tolist() == right
        assert split_batch(batch, 2)[1].spans.begins == ((0,),)


def work(size: int, index: int, other: int, split: str) -> int:
    """Pairs that a rank multiplies with the keys of another, hidden ones included."""
    mask = context_mask(size, index, split)
    tiles = mask.blocks(mask.keys_of(size, other), 1)
    return sum((tile.keys.stop - tile.keys.start) * (tile.queries.stop - tile.queries.start) for tile in tiles)


@pytest.mark.parametrize("split", ["zigzag", "striped"])
@pytest.mark.parametrize("size", [2, 4])
def test_work_is_even_in_every_step_and_half_of_the_square(size: int, split: str) -> None:
    mine = [[work(size, index, (index - step) % size, split) for index in range(size)] for step in range(size)]
    assert all(max(step) <= 1.06 * min(step) for step in mine)
    assert max(step[0] for step in mine) <= 1.06 * min(step[0] for step in mine)
    assert sum(map(sum, mine)) == SEQUENCE * (SEQUENCE + 1) // 2
    plain = [[work(size, index, (index - step) % size, "chunks") for index in range(size)] for step in range(size)]
    slowest = sum(max(step) for step in plain)
    assert slowest > 1.4 * sum(step[0] for step in mine)


def test_a_window_bounds_the_work() -> None:
    mask = context_mask(4, 3, "chunks", window=5)
    for tiles_of in (mask.blocks, mask.chunks):
        assert [sum(1 for _ in tiles_of(mask.keys_of(4, other))) for other in range(4)] == [0, 0, 1, 1]


def test_what_hides_pairs_of_a_wide_window_stays_small() -> None:
    """On a CPU, whose kernel takes it as numbers."""
    sequence, window = 131072, 65536
    mask = mask_maker(alone(2, 1), "zigzag")(sequence // 2, sequence // 2, window=window)
    assert isinstance(mask, ContextMask)
    q = torch.empty(1, sequence // 2, 1, 8)
    sizes = [
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for tile in ring._tiles(mask, mask.keys_of(2, 0), q, True)
        if not (tile.is_whole or tile.is_causal)
    ]
    assert 0 < max(sizes) <= (window + ring.STRETCH) * ring.STRETCH


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize(("left", "right"), [(20, -1), (-1, 3), (40, 0), (70, 30)])
def test_a_gpu_takes_borders_as_its_kernel_documents_them(heads: tuple[int, int], left: int, right: int) -> None:
    q, gradient = (torch.randn(2, heads[0], 96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, heads[1], 130, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    how = {"left": left, "right": right, "scale": 0.1}
    seen = in_band(96, 130, left, right)
    assert seen.any(1).all()
    out, lse = compat.banded_attention(q, k, v, **how)  # type: ignore[arg-type]
    exact, sums = banded(*(x.cpu().double() for x in (q, k, v)), **how)  # type: ignore[arg-type]
    assert _relative(out.cpu().double(), exact) < 1e-2 and _relative(lse.cpu().double(), sums) < 1e-3
    gradients = compat.banded_attention_backward(gradient, q, k, v, out, lse, **how)  # type: ignore[arg-type]
    exact_inputs = (x.cpu().double() for x in (gradient, q, k, v))
    for computed, right_one in zip(gradients, banded_backward(*exact_inputs, exact, sums, **how), strict=True):  # type: ignore[arg-type]
        assert _relative(computed.cpu().double(), right_one) < 2e-2


LOOPS = "widths of the compiled loops"
WIDTHS = {"mha": (4, 4, 8, 8), "gqa": (4, 2, 8, 8), "mqa": (3, 1, 8, 8), "mla": (3, 3, 12, 8), "wide": (3, 3, 8, 12),
          LOOPS: (4, 2, 32, 16)}  # fmt: skip
"""Query heads, key heads, widths of keys and of values; either may be the wider."""


def documents() -> Tensor:
    """Borders inside chunks, at borders of ranks, and documents of one token; rows differ."""
    lengths = [[36, 18, 1, 50, 39], [100, 2, 42]]
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows)


def inputs(widths: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v and a gradient of the result, of the whole sequence; the same on all ranks."""
    heads, keys, wide, narrow = widths
    generator = torch.Generator().manual_seed(7)
    shapes = [(heads, wide), (keys, wide), (keys, narrow), (heads, narrow)]
    return tuple(torch.randn(BATCH, SEQUENCE, *shape, generator=generator).to(dtype) for shape in shapes)


def with_gradients(attend: Callable[..., Tensor], arguments: tuple[Tensor, ...], mask: Mask) -> list[Tensor]:
    """The result and the gradients of q, k, v."""
    q, k, v = (x.clone().requires_grad_() for x in arguments[:3])
    out = attend(q, k, v, mask, scale=SCALE)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), arguments[3])]


def far(computed: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert computed.shape == expected.shape and computed.dtype == expected.dtype
    return float((computed - expected).abs().max() / expected.abs().max())


@cache
def on_one_device(widths: str, window: int, packed: bool) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Inputs of the whole sequence, and the reference result and gradients."""
    arguments = inputs(WIDTHS[widths])
    mask = causal_mask(SEQUENCE, SEQUENCE, window=window, documents=documents() if packed else None)
    return arguments, with_gradients(attend_reference, arguments, mask)


def compare(cases: list[tuple[str, bool, str, int, bool]], fused: bool) -> dict[str, float]:
    """On a rank: the worst difference of each case (route, split, widths, window, packed) from one device."""
    cp = make_mesh(Layout(cp=torch.distributed.get_world_size()))["cp"]
    worst = {}
    attended, loops = Mock(wraps=sequence_attention.attend), fused and training_rows.is_compiled()
    with (
        patch.object(ring, "can_fuse", lambda q, k: fused), patch.object(partial, "LEAST_PAIRS", 0),
        patch.object(sequence_attention, "attend", attended),
    ):  # fmt: skip
        for route, split, widths, window, packed in cases:
            arguments, whole = on_one_device(widths, window, packed)
            rows = documents() if packed else None
            mine = tuple(take(x, cp, split) for x in arguments)
            local = None if rows is None else take(rows, cp, split)
            mask = mask_maker(cp, split)(mine[0].shape[1], mine[0].shape[1], window=window, documents=local)
            computed = with_gradients(context_attend(cp, route), mine, mask)
            name = f"{route} {split} {widths} window={window} packed={packed}"
            worst[name] = max(far(a, take(b, cp, split)) for a, b in zip(computed, whole, strict=True))
            # Whole tiles and causal ones of these widths go through the loops; a window has others.
            if widths == LOOPS and not window:
                assert bool(attended.call_count) == loops, name
            attended.reset_mock()
    return worst


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["blocks", "fused"])
@pytest.mark.long
def test_attention_and_gradients_equal_one_device(size: int, fused: bool) -> None:
    masks = [(0, False), (7, False), (60, False), (0, True), (30, True)]
    cases = [
        (route, split, widths, *mask) for route, split, widths, mask in itertools.product(ROUTES, SPLITS, WIDTHS, masks)
    ]
    for worst in on_ranks(size, compare, cases, fused):
        assert len(worst) == len(cases)
        assert not {name: error for name, error in worst.items() if not error < 1e-5}


def banded(q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float) -> tuple[Tensor, Tensor]:
    """Stands in for a GPU's kernel, by the sentence of `in_band`."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~in_band(q.shape[2], k.shape[2], left, right), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def banded_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of its backward pass: weights from the log-sum-exp over all keys."""
    heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    seen = in_band(q.shape[2], k.shape[2], left, right)
    weights = (q @ k.mT * scale - lse[..., None]).exp().masked_fill(~seen, 0.0)
    of_scores = weights * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)) * scale
    of_k, of_v = of_scores.mT @ q, weights.mT @ gradient
    return of_scores @ k, *(x.unflatten(1, (heads, -1)).sum(2) for x in (of_k, of_v))


@pytest.mark.parametrize("window", [2, 7, 60])
@pytest.mark.parametrize("split", SPLITS)
def test_a_gpu_is_told_the_borders_of_a_window_as_numbers(
    monkeypatch: pytest.MonkeyPatch, split: str, window: int
) -> None:
    flash, back = compat.flash_attention, compat.flash_attention_backward
    monkeypatch.setattr(partial, "device_kind", lambda x: "cuda")
    monkeypatch.setattr(ring, "device_kind", lambda x: "cuda")
    monkeypatch.setattr(
        compat, "flash_attention", lambda *arguments, **how: flash(*arguments, **{**how, "device": "cpu"})
    )
    monkeypatch.setattr(
        compat, "flash_attention_backward", lambda *arguments, **how: back(*arguments, **{**how, "device": "cpu"})
    )
    monkeypatch.setattr(compat, "banded_attention", banded)
    monkeypatch.setattr(compat, "banded_attention_backward", banded_backward)
    arguments, whole = on_one_device("gqa", window, True)
    begins = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    begins[:, 1:] = documents().diff(dim=1) != 0
    first = torch.arange(SEQUENCE).where(begins, 0).cummax(1).values
    q, k, v, gradient = arguments
    sums = [torch.zeros_like(x) for x in (k, v)]
    for index in range(4):
        at = places(SEQUENCE, 4, index, split)
        mask = ContextMask.make(alone(4, index), at, split, q.device, take_at(first, at, 1), window)
        mine, keys, values = take_at(q, at, 1), k.transpose(1, 2), v.transpose(1, 2)
        attention = partial.PartialAttention(mine, v.shape[-1], scale=SCALE, fused=True)
        parts = [places(SEQUENCE, 4, other, split) for other in range(4)]
        for held in parts:
            attention.add(take_at(keys, held, 2), take_at(values, held, 2), ring._tiles(mask, held, mine, True))
        out, lse = attention.result()
        of_out = take_at(gradient, at, 1)
        gradients = partial.PartialGradients(mine, out, lse, of_out, scale=SCALE, fused=True)
        for held in parts:
            of_k, of_v = (torch.zeros_like(take_at(x, held, 2)) for x in (keys, values))
            tiles = ring._tiles(mask, held, mine, True)
            gradients.add(take_at(keys, held, 2), take_at(values, held, 2), tiles, of_k, of_v)
            there = held.positions(0, SEQUENCE // 4)
            for total, part in zip(sums, (of_k, of_v), strict=True):
                total.index_add_(1, there, part.transpose(1, 2))
        assert far(out, take_at(whole[0], at, 1)) < 1e-5
        assert far(gradients.result(), take_at(whole[1], at, 1)) < 1e-5
    assert max(far(a, b) for a, b in zip(sums, whole[2:], strict=True)) < 1e-5


def low_precision(fused: bool, native: bool) -> list[float]:
    """On a rank: errors of bf16 against fp32 sums of the same values, ours over those of one device: of the reference,
    which rounds once; of plain bf16 code where torch's fused kernel is given bf16, since no flash kernel does."""
    cp = make_mesh(Layout(cp=2))["cp"]
    arguments = inputs(WIDTHS["gqa"], torch.bfloat16)
    exact = with_gradients(attend_reference, tuple(x.float() for x in arguments), Mask())
    plain = with_gradients(plain_causal if fused and native else attend_reference, arguments, Mask())
    mine = tuple(take(x, cp, "zigzag") for x in arguments)
    with (
        patch.object(ring, "can_fuse", lambda q, k: fused),
        patch.object(compat, "cpu_multiplies", lambda dtype: native),
    ):
        computed = with_gradients(context_attend(cp, "ring"), mine, mask_maker(cp, "zigzag")(72, 72))
    assert [x.dtype for x in computed] == [torch.bfloat16] * 4
    ours = [_relative(a.float(), take(b, cp, "zigzag")) for a, b in zip(computed, exact, strict=True)]
    return [a / _relative(b.float(), c) for a, b, c in zip(ours, plain, exact, strict=True)]


def _relative(computed: Tensor, expected: Tensor) -> float:
    """The length of the difference, relative to the length."""
    return float((computed - expected).norm() / expected.norm())


def plain_causal(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    """Every product and sum rounded to the dtype of q."""
    return plain_attention(q, k, v, torch.ones(1, q.shape[1], k.shape[1], dtype=torch.bool).tril(), scale)


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("fused", [False, True], ids=["blocks", "fused"])
def test_16_bit_is_rounded_once(fused: bool, native: bool) -> None:
    for ratios in on_ranks(2, low_precision, fused, native):
        assert max(ratios) <= (FUSED_ATTENTION if fused and native else 1.5), ratios


SMALL = ModelShape(vocab=61, layers=3, hidden=24, heads=4, kv_heads=2, ffn=40, max_positions=SEQUENCE)
SHAPES = {
    "gqa": replace(SMALL, qk_norm=True),
    "window": replace(SMALL, window=50, window_from_layer=1),
    "learned": replace(SMALL, family="gpt2", kv_heads=4, norm="layernorm", mlp="gelu_tanh", positions="learned"),
    "mla": replace(SMALL, kv_heads=4, mla=MLAShape(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=5)),
}


def loss_and_gradients(model: Transformer, batch: dict[str, Any]) -> dict[str, Tensor]:
    losses = model.loss(**batch, scale=torch.tensor(1 / (BATCH * SEQUENCE)))
    losses.cross_entropy.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": losses.cross_entropy.detach(), **gradients}


def train_models(cases: list[tuple[str, str, str, bool, str]]) -> dict[str, float]:
    """On a rank: the worst difference of each case (shape, route, split, packed, recompute) from one device."""
    cp = make_mesh(Layout(cp=torch.distributed.get_world_size()))["cp"]
    worst = {}
    for name, route, split, packed, recompute in cases:
        tokens = torch.randint(61, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        if packed:
            begins = torch.cat((torch.ones(BATCH, 1, dtype=torch.int64), documents().diff(dim=1)), 1)
            positions = positions - positions.where(begins > 0, 0).cummax(1).values
        rows = documents() if packed else None
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "documents": rows}
        expected = loss_and_gradients(build(SHAPES[name], seed=1), batch)
        model = build(SHAPES[name], seed=1)
        model.seams.call = block_call(recompute)
        model.seams.mask = mask_maker(cp, split)
        model.seams.attend = context_attend(cp, route)
        sharded = loss_and_gradients(model, {key: x if x is None else take(x, cp, split) for key, x in batch.items()})
        assert sharded.keys() == expected.keys()
        errors = [far(cp.all_reduce(sharded[key].clone()), expected[key]) for key in expected]
        worst[f"{name} {route} {split} {packed} {recompute}"] = max(errors)
    return worst


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.long
def test_models_equal_one_device(size: int) -> None:
    cases = [
        ("gqa", "ring", "zigzag", False, "none"),
        ("gqa", "ring", "zigzag", True, "full"),
        ("gqa", "ring", "striped", True, "selective"),
        ("gqa", "all-gather", "striped", False, "selective"),
        ("window", "ring", "striped", True, "selective"),
        ("window", "all-gather", "chunks", False, "full"),
        ("learned", "ring", "zigzag", False, "full"),
        ("mla", "ring", "zigzag", True, "selective"),
        ("mla", "all-gather", "zigzag", True, "none"),
    ]
    for worst in on_ranks(size, train_models, cases):
        assert len(worst) == len(cases)
        assert not {name: error for name, error in worst.items() if not error < 1e-5}


def kept_and_sent(route: str, dtype: torch.dtype) -> tuple[int, dict[str, int], dict[str, int]]:
    """On a rank: bytes kept for the backward pass, and bytes sent forward and backward, by collective."""
    mesh = make_mesh(Layout(cp=torch.distributed.get_world_size()))
    cp, traffic = mesh["cp"], mesh.traffic
    q, k, v, gradient = (take(x, cp, "zigzag") for x in inputs(WIDTHS["gqa"], dtype))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = context_attend(cp, route)(q, k, v, mask_maker(cp, "zigzag")(q.shape[1], k.shape[1]), scale=SCALE)
    forward = traffic.snapshot()
    out.backward(gradient)
    sent = [{what: size for (_, what), (_, size) in counts.items()} for counts in (forward, traffic.since(forward))]
    return sum(storages.values()), sent[0], sent[1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_kept_and_sent(size: int, dtype: torch.dtype) -> None:
    """Kept: q, k, v, the result and a log-sum-exp of S / c positions. Sent: the closed form of the module."""
    heads, keys, wide, narrow = WIDTHS["gqa"]
    positions, width = BATCH * SEQUENCE // size, dtype.itemsize
    kept_bytes = positions * ((heads * wide + keys * wide + keys * narrow + heads * narrow) * width + heads * 4)
    hops = (size - 1) * positions * keys * (wide + narrow)
    for counted in on_ranks(size, kept_and_sent, "ring", dtype):
        assert counted == (kept_bytes, {"send": hops * width}, {"send": hops * (width + 4)})
    for counted in on_ranks(size, kept_and_sent, "all-gather", dtype):
        assert counted == (
            kept_bytes,
            {"all_gather": hops * width},
            {"all_gather": hops * width, "reduce_scatter": hops * 4},
        )


def test_foreign_masks_are_refused() -> None:
    arguments = inputs(WIDTHS["gqa"])[:3]
    attend = context_attend(alone(2, 0), "ring")
    with pytest.raises(IllegalLayout, match=r"layout.cp=2 ranks got a mask for one device"):
        attend(*arguments, Mask(), scale=SCALE)


@pytest.mark.parametrize("route", ROUTES)
def test_a_group_of_one_is_one_device(route: str) -> None:
    arguments = inputs(WIDTHS["gqa"])
    mask = mask_maker(alone(1, 0), "zigzag")(SEQUENCE, SEQUENCE, window=9, documents=documents())
    computed = with_gradients(context_attend(alone(1, 0), route), arguments, mask)
    whole = with_gradients(
        attend_reference, arguments, causal_mask(SEQUENCE, SEQUENCE, window=9, documents=documents())
    )
    assert max(far(a, b) for a, b in zip(computed, whole, strict=True)) < 1e-5


def test_places_count_what_lies_before() -> None:
    held = places(16, 4, 1, "zigzag")
    assert [held.count_up_to(position) for position in range(-1, 16)] == [0, 0, 0, 1, 2, *[2] * 8, 3, 4, 4, 4]
    assert held.positions(1, 3).tolist() == [3, 12]
