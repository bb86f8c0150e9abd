"""Parts of a matrix are rounded to the numbers of the rounded whole, bit for bit; and these to those of torch's own."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from meshwright.kernels.quantized import quantize
from meshwright.kernels.quantized.quantize import MatrixPart, coded, part_of_rows
from meshwright.kernels.quantized.quantized_linear import row_codes
from meshwright.model.fake_quantized import straight_through
from meshwright.spec import presets
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.model.shape import ModelShape, MoEShape
from meshwright.spec.rules.passes import learnable
from meshwright.spec.weights.boxes import Box, CodesCut, boxes_of, rounded_matrices, shared_scales
from meshwright.spec.weights.inventory import Parameter

SHAPE = ModelShape(vocab=31, layers=1, hidden=96, heads=8, kv_heads=2, head_dim=12, ffn=101, max_positions=16)
ROUTED = replace(SHAPE, family="mixtral", moe=MoEShape(experts=3, top_k=2, ffn=45, shared_experts=1))
WHOLE_GROUPS = replace(SHAPE, head_dim=32, ffn=256, hidden=101)
CASES = [
    (shape, scheme)
    for scheme in learnable()
    for shape in ((WHOLE_GROUPS,) if SCHEMES[scheme].zeros == "real" else (SHAPE, ROUTED, WHOLE_GROUPS))
]


class Ranks:
    """As many threads as ranks, which take the largest of what each gives."""

    def __init__(self, number: int) -> None:
        self.peaks: dict[int, Tensor] = {}
        self.barrier = Barrier(number)

    def largest(self, rank: int) -> Callable[[Tensor], Tensor]:
        def largest_so_far(x: Tensor) -> Tensor:
            self.peaks[rank] = x.clone()
            self.barrier.wait(timeout=20)
            actual = x.copy_(torch.stack(list(self.peaks.values())).amax(0))
            self.barrier.wait(timeout=20)
            return actual

        return largest_so_far


def at_once(number: int, run: Callable[[int], None]) -> None:
    threads = [Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drawn(random: Random, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, many the same and some zero; empty rows, too."""
    chance = torch.Generator().manual_seed(random.randrange(2**31))
    weight = torch.randn(size, generator=chance) * 10 ** torch.randint(-3, 2, (*size[:-1], 1), generator=chance)
    weight = torch.where(torch.rand(size, generator=chance) < 0.3, weight.mul(8).round().div(8), weight)
    weight[torch.rand(size[:-1], generator=chance) < 0.1] = 0.0
    return weight.to(dtype)


def parts(weight: Tensor, matrix: Parameter, shape: ModelShape, scheme: Scheme, tp: int) -> list[tuple[Box, Tensor]]:
    """What each rank makes of its part."""
    boxes = [boxes_of((matrix,), shape, Layout(tp=tp), rank)[matrix.name] for rank in range(tp)]
    shared = shared_scales(matrix, shape, scheme, tp)
    ranks, actual = Ranks(tp), dict[int, Tensor]()

    def run(rank: int) -> None:
        part = MatrixPart(CodesCut(scheme=scheme, box=boxes[rank]), ranks.largest(rank)) if shared.numbers else None
        actual[rank] = straight_through(weight[boxes[rank].slices].contiguous(), scheme, part).detach()

    at_once(tp, run)
    return [(box, actual[rank]) for rank, box in enumerate(boxes)]


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_parts_are_those_of_the_rounded_whole(shape: ModelShape, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by outputs and by inputs, within groups and between them, unevenly, experts too; some rows at a time."""
    random, scheme = Random(name), SCHEMES[name]
    counted = 0
    for tp in (2, 4, 8):
        for matrix in rounded_matrices(shape):
            monkeypatch.setattr(quantize, "PIECE", random.choice((300, 2**22)))
            weight = drawn(random, matrix.shape, random.choice((torch.float32, torch.bfloat16)))
            whole = coded(weight, scheme).restored(weight.dtype)
            for box, part in parts(weight, matrix, shape, scheme, tp):
                assert torch.equal(part, whole[box.slices]), (matrix.name, tp)
                counted += part.numel() < whole.numel()
    assert counted > 20


@pytest.mark.parametrize("name", [name for name in learnable() if SCHEMES[name].zeros != "real"])
def test_a_part_with_scales_of_its_own_would_be_another(name: str) -> None:
    """So that the test above can fail: somewhere a rank needs what others hold."""
    scheme = SCHEMES[name]
    matrix = next(matrix for matrix in rounded_matrices(SHAPE) if matrix.name.endswith("down.weight"))
    weight = drawn(Random(7), matrix.shape, torch.float32)
    whole = coded(weight, scheme).restored(weight.dtype)
    boxes = [box for box, _ in parts(weight, matrix, SHAPE, scheme, 2)]
    alone = [straight_through(weight[box.slices].contiguous(), scheme) for box in boxes]
    assert not all(torch.equal(part, whole[box.slices]) for part, box in zip(alone, boxes, strict=True))


@pytest.mark.parametrize("tp", [2, 3])
def test_rows_of_activations_have_the_scales_of_whole_rows(tp: int) -> None:
    x = drawn(Random(tp), (17, 53), torch.bfloat16)
    codes, scales = row_codes(x)
    ranks, cut = Ranks(tp), x.tensor_split(tp, 1)
    actual: dict[int, tuple[Tensor, Tensor]] = {}
    at_once(tp, lambda rank: actual.update({rank: part_of_rows(cut[rank], ranks.largest(rank))}))
    assert torch.equal(torch.cat([actual[rank][0] for rank in range(tp)], 1), codes)
    assert all(torch.equal(actual[rank][1], scales) for rank in range(tp))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_is_hidden_on_none(bad: float) -> None:
    """A row, or a run, with such a number is not finite anywhere, as on one device."""
    matrix = next(matrix for matrix in rounded_matrices(SHAPE) if matrix.name.endswith("down.weight"))
    weight = drawn(Random(1), matrix.shape, torch.float32)
    weight[3, 0] = bad
    for _, part in parts(weight, matrix, SHAPE, SCHEMES["int8"], 2):
        assert not part[3].isfinite().any() and part[4:].isfinite().all()


def per_channel(weight: Tensor, scales: Tensor, zeros: Tensor, low: int, high: int) -> Tensor:
    """What torch's own fake quantization makes of rows that share a scale."""
    actual: Tensor = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, low, high)
    return actual


def ties(rows: int, columns: int, seed: int) -> Tensor:
    """Rows whose scale is a power of two, with numbers half way between two codes."""
    chance = torch.Generator().manual_seed(seed)
    steps = torch.randint(-253, 254, (rows, columns), generator=chance) / 2
    steps[:, 0] = 127.0
    return steps * 2.0 ** torch.randint(-9, 0, (rows, 1), generator=chance)


@pytest.mark.parametrize("seed", range(6))
def test_int8_rounds_as_torch_does(seed: int) -> None:
    """Bit for bit, ties too: to even codes, each row by its scale."""
    weight = ties(12, 64, seed) if seed % 2 else drawn(Random(seed), (12, 64), torch.float32)
    matrix = coded(weight, SCHEMES["int8"])
    scales = matrix.scales.float().flatten()
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    assert torch.equal(straight_through(weight, SCHEMES["int8"]), per_channel(weight, scales, zeros, -127, 127))


@pytest.mark.parametrize("name", ["int4-sym", "int4-rtn"])
@pytest.mark.parametrize("seed", range(6))
def test_groups_round_as_rows_of_torch_do(name: str, seed: int) -> None:
    """A group is a row of its own there. With zero points torch rounds the number of steps before it adds the zero, and
    so do codes of whole zeros but for ties, which its even neighbour of the sum decides."""
    scheme = SCHEMES[name]
    weight = drawn(Random(seed), (6, 3 * scheme.group), torch.float32)
    matrix = coded(weight, scheme)
    scales, zeros = matrix.scales.float().flatten(), matrix.every_zero()
    whole = zeros.flatten() if zeros.dim() else torch.full_like(scales, float(zeros))
    low = 0 if scheme.zeros == "whole" else 1
    wanted = per_channel(weight.view(-1, scheme.group), scales, whole.to(torch.int32), low, 2**scheme.bits - 1)
    actual = straight_through(weight, scheme)
    tied = ((weight.view(-1, scheme.group) / scales[:, None]) % 1 == 0.5).view_as(weight)
    assert torch.equal(actual[~tied], wanted.view_as(weight)[~tied])
    apart = (actual - wanted.view_as(weight)).abs()[tied]
    assert (apart <= scales.repeat_interleave(scheme.group).view_as(weight)[tied] * (1 + 1e-6)).all()


def test_usual_models_have_their_groups_whole() -> None:
    """What is asked of ranks: of rows of W_o and W_down by int8, nothing by groups that fit, all by doubled scales."""
    shape = presets.model("llama-3.1-8b")
    actual = {
        name: {
            matrix.name.rpartition("layers.0.")[2]: shared_scales(matrix, shape, SCHEMES[name], 8)
            for matrix in rounded_matrices(shape)
        }
        for name in ("int8", "int4-rtn", "nf4-double")
    }
    assert actual["int8"]["mlp.down.weight"] == (4096, True, True)
    assert actual["int8"]["mlp.up.weight"] == (0, False, False)
    assert {matrix.numbers for matrix in actual["int4-rtn"].values()} == {0}
    assert actual["nf4-double"]["mlp.up.weight"].numbers == 14336 * 4096 // 64
