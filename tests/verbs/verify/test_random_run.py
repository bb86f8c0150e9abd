"""`meshwright verify --random` on real processes: correct cases are equal, planted faults are found."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.observe.oracle import feature_matrix, one_device
from meshwright.observe.oracle.feature_matrix import from_arrays, to_arrays
from meshwright.observe.oracle.one_device import BANDS, Case, DrawnTeacher, RankOutcome, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.axes import data
from meshwright.parallel.engine import Engine
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec.layout.layout import Layout
from meshwright.spec.weights.boxes import Box
from meshwright.training.step import batches
from meshwright.verbs.main import main
from meshwright.verbs.verify import random_run
from meshwright.verbs.verify.cases import DrawnCase, format_case, parse_case, random_case
from meshwright.verbs.verify.random_run import (
    ALONE,
    CaseVerdict,
    difference,
    judge_case,
    judge_cases,
    smallest,
    wrong_alone,
)

SEED, NUMBER = 367, 8
"""A draw that has one key head under tp, fp16 with an overflow, and most others. `verify --random 100 --seed S` is the
long one."""


@pytest.mark.long
def test_a_small_draw_is_equal() -> None:
    cases = [random_case(SEED, index, processes=4) for index in range(NUMBER)]
    differences = {verdict.index: verdict.difference for verdict in judge_cases(cases)}
    assert differences == dict.fromkeys(range(NUMBER))


@pytest.mark.long
def test_where_one_device_differs_from_itself_with_every_seed_a_layout_may_as_much() -> None:
    """One target per sequence, whose gradients have few directions: Muon enlarges the rounding of all others."""
    drawn = parse_case(
        "vocab=53 layers=2 hidden=31 heads=2 head_dim=32 positions=learned qk_norm=true tp=2 sequence=6 "
        "optimizer=muon last_target=1"
    )
    alone = outcome(drawn.case, ALONE)
    band = random_run.unsettled_band(drawn.case, alone)
    assert BANDS["fp32"].weight <= band.weight <= random_run.WIDEST_FP32
    assert judge_case(drawn).difference is None


TP = (
    "heads=2 tp=2 qkv_bias=true out_bias=true qk_norm=true micro_batch=4 clip=0.05",
    "heads=2 tp=2 sp=true norm=layernorm recompute=full clip=0.05",
)
DP = (
    "dp_replicate=2 micro_batch=2 clip=0.05 empty=0,1,2,3",
    "dp_shard=2 zero=1 micro_batch=2 clip=0.05",
    "dp_shard=2 zero=3 clip=0.05",
    "cp=2 clip=0.05 packed=true",
)
PP = ("pp=2 vp=2 schedule=interleaved layers=5 micro_batch=1 clip=0.05", "pp=2 schedule=zb-h1 micro_batch=1 tied=true")
TAUGHT = (
    "teacher.layers=3 tp=2 clip=0.05",
    "teacher.layers=1 teacher.beta=0.5 teacher.hard=0.2 dp_replicate=2 clip=0.05",
    "teacher.layers=2 dp_shard=2 zero=3 clip=0.05",
)
HALF = ("dp_replicate=2 precision=fp16 overflow=1 overflow_sequence=5", "tp=2 precision=fp16 overflow=2")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _sum_left_out() -> Any:
    return patch.object(Engine, "_sum", lambda self, parameters, group: None)


def _sum_doubled() -> Any:
    original = Engine._sum

    def twice(self: Engine, parameters: Any, group: Group) -> None:
        parameters = list(parameters)
        original(self, parameters, group)
        for parameter in parameters:
            if parameter.grad is not None:
                data.local(parameter.grad).mul_(2)

    return patch.object(Engine, "_sum", twice)


def _own_tokens_only() -> Any:
    return patch.object(Engine, "total", lambda self, number, device: torch.tensor(float(number), dtype=torch.float64))


def _mean_of_replicas() -> Any:
    """Gradients divided by the ranks that sum them, as DistributedDataParallel does."""
    original = Engine.finish_gradients

    def mean(self: Engine) -> None:
        original(self)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                data.local(parameter.grad).div_(self.mesh["data"].size)

    return patch.object(Engine, "finish_gradients", mean)


def _wrong_clip() -> Any:
    original = one_device.train_step
    return patch.object(
        one_device, "train_step", lambda *args, clip, **options: original(*args, clip=1.5 * clip, **options)
    )


def _unseen_overflow() -> Any:
    """Rank 1 takes the step that rank 0 skips."""
    original = Engine.gradient_norm

    def seen_by_rank_0(self: Engine, gradients: dict[str, Tensor]) -> Tensor:
        norm = original(self, gradients)
        return norm if self.mesh.rank == 0 else norm.nan_to_num(1.0, 1.0)

    return patch.object(Engine, "gradient_norm", seen_by_rank_0)


def _norm_of_this_rank() -> Any:
    """As a rank sees it alone."""

    def norm_here(self: Engine, gradients: dict[str, Tensor]) -> Tensor:
        norms = [data.local(gradient).float().norm() for gradient in gradients.values()]
        return torch.stack(norms).norm()

    return patch.object(Engine, "gradient_norm", norm_here)


def _other_sequences() -> Any:
    """Every rank reads the same ones."""
    return patch.object(
        one_device, "select", lambda batch, share=batches.WHOLE: batches.select(batch, replace(share, index=0))
    )


def _last_micro_batch_lost() -> Any:
    original = Engine.forward_backward
    return patch.object(Engine, "forward_backward", lambda self, passes, after=None: original(self, passes[:-1], after))


def _other_teachers() -> Any:
    """Each rank draws one of its own."""
    original = DrawnTeacher.objective
    return patch.object(
        DrawnTeacher,
        "objective",
        lambda self, shape, layout, mesh, device, dtype, seed: original(
            self, shape, layout, mesh, device, dtype, seed + mesh.rank
        ),
    )


def _loss_of_this_rank() -> Any:
    return patch.object(Engine, "sum_loss", lambda self, loss: loss.detach().clone())


FAULTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a sum left out over tp": (_sum_left_out, TP),
    "a sum doubled over tp": (_sum_doubled, TP),
    "tokens of this rank only": (_own_tokens_only, DP[1:]),
    "a mean in place of a sum": (_mean_of_replicas, DP),
    "another clip": (_wrong_clip, DP[:1]),
    "the norm of this rank": (_norm_of_this_rank, TP + PP[:1] + DP[1:2]),
    "an overflow seen by one rank": (_unseen_overflow, HALF),
    "the same sequences on every rank": (_other_sequences, DP[:3]),
    "a micro-batch lost": (_last_micro_batch_lost, DP[:2]),
    "the loss of this rank": (_loss_of_this_rank, DP + PP),
    "a teacher for each rank": (_other_teachers, TAUGHT),
}


def _with_faults(texts: list[tuple[str, str]]) -> list[RankOutcome]:
    process_groups: ProcessGroups = {}
    outcomes = []
    for fault, text in texts:
        drawn = parse_case(text)
        with FAULTS[fault][0]() if fault else _nothing():
            outcomes.append(to_arrays(outcome(drawn.case, drawn.layout, process_groups=process_groups)))
    return outcomes


@pytest.mark.slow
def test_every_planted_fault_is_found_and_nothing_without_one() -> None:
    texts = list(dict.fromkeys(text for _, cases in FAULTS.values() for text in cases))
    runs = [("", text) for text in texts] + [(fault, text) for fault, (_, cases) in FAULTS.items() for text in cases]
    ranks = [list(map(from_arrays, rank)) for rank in on_ranks(2, _with_faults, runs, limit_s=900)]
    alone = {text: outcome(parse_case(text).case, ALONE) for text in texts}
    for index, (fault, text) in enumerate(runs):
        first = one_device.first_difference(alone[text], [rank[index] for rank in ranks], parse_case(text).case.band)
        assert (first is not None) == bool(fault), f"{fault or 'no fault'}: {text}: {first}"


def _no_number(self: Engine, loss: Tensor) -> Tensor:
    return loss.detach() * float("nan")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_no_number_everywhere_is_not_equal(precision: str) -> None:
    """Every step is skipped on both sides, so that weights agree and no gradient is left to compare."""
    case = parse_case(f"precision={precision} micro_batch=4 layers=1").case
    with patch.object(Engine, "sum_loss", _no_number):
        alone = outcome(case, ALONE)
    assert difference(case, alone, [alone]) == "step 1: loss is nan on rank 0, nan on one device"


def test_only_the_step_that_overflows_may_have_no_number() -> None:
    case = parse_case(f"{HALF[1]} micro_batch=4 layers=1").case
    alone = outcome(case, ALONE)
    assert not isfinite(alone.norms[1]) and one_device.first_difference(alone, [alone], BANDS["fp16"]) is None
    for changed, words in (
        ({"norms": (alone.norms[1],) * 2}, "step 1: gradient norm is"),
        ({"norms": (alone.norms[0],) * 2}, "step 2: gradient norm is"),
        ({"skipped": (False, False)}, "step 2: skipped is False on rank 0, True on one device"),
    ):
        other = one_device.first_difference(alone, [replace(alone, **changed)], BANDS["fp16"])
        assert (other or "").startswith(words)


def test_a_rank_that_fails_is_a_difference_and_the_others_are_still_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is run again, case by case."""
    monkeypatch.setattr(feature_matrix, "outcomes_of", _fails_with_a_window)
    cases = [parse_case("dp_replicate=2"), parse_case("dp_replicate=2 window=3"), parse_case("tp=2 global_batch=2")]
    differences = {verdict.index: verdict.difference for verdict in judge_cases(cases)}
    assert differences[0] is None and differences[2] is None
    assert (
        differences[1] is not None
        and differences[1].startswith("rank ")
        and differences[1].endswith("ValueError: no windows today")
    )


def _fails_with_a_window(cases: list[tuple[Case, Layout]], device: str) -> list[RankOutcome]:
    if any(case.shape.window for case, _ in cases):
        raise ValueError("no windows today")
    process_groups: ProcessGroups = {}
    return [to_arrays(outcome(case, layout, process_groups=process_groups)) for case, layout in cases]


def test_two_experts_almost_equally_wanted_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = parse_case("moe.experts=8 moe.top_k=2 moe.ffn=4 micro_batch=2 global_batch=4")
    margins = [outcome(replace(drawn.case, seed=seed), ALONE).margin for seed in range(6)]
    best = max(range(1, 6), key=margins.__getitem__)
    if margins[best] <= max(margins[:best]):
        best = margins.index(max(margins))
    monkeypatch.setattr(random_run, "NEAR_TIE", margins[best])
    monkeypatch.setattr(random_run, "ROUNDING", 1.0)
    verdict = judge_case(drawn, settle=True)
    assert verdict.redrawn == best and verdict.drawn.case.seed == best and verdict.difference is None
    assert judge_case(drawn).drawn == drawn, "a case that is named is run as it is"


def test_a_case_that_rounding_decides_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is set between two seeds of a case, of which the next one rounds less."""
    text = (
        "vocab=41 layers=1 hidden=18 heads=2 ffn=44 norm=layernorm positions=learned qkv_bias=true mlp_bias=true "
        "qk_norm=true moe.experts=5 moe.top_k=1 moe.ffn=6 global_batch=1 sequence=12 seed=85 balance_loss=0.0"
    )
    drawn = parse_case(text)
    cases = [replace(drawn.case, seed=drawn.case.seed + more) for more in range(5)]
    sizes = [random_run._rounding(case, outcome(case, ALONE), "cpu") for case in cases]
    first = next(index for index in range(4) if sizes[index + 1] < sizes[index])
    monkeypatch.setattr(random_run, "ROUNDING", sizes[first + 1])
    verdict = judge_case(replace(drawn, case=cases[first]), settle=True)
    assert verdict.redrawn == 1 and verdict.difference is None
    assert verdict.drawn.case.seed == cases[first + 1].seed


@pytest.mark.parametrize("step", [1, 2])
def test_what_fp16_must_do_on_one_device(step: int) -> None:
    case = parse_case(f"precision=fp16 overflow={step} micro_batch=4").case
    alone = outcome(case, ALONE)
    other = [2.0**29, 2.0**8] if step == 1 else [2.0**8, 2.0**29]
    assert list(alone.scales) == other
    good = replace(alone, losses=outcome(replace(case, precision="fp32"), ALONE).losses)
    assert wrong_alone(case, good) is None
    halved = replace(good, losses=(good.losses[0] / 2, good.losses[1]))
    assert "step 1: loss is" in (wrong_alone(case, halved) or "")
    assert "loss scale is 1 after" in (wrong_alone(case, replace(good, scales=(1.0, 1.0))) or "")


def test_a_difference_is_made_small_and_printed_as_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of one setting, without processes: every case with a window is wrong."""

    def judged(drawn: DrawnCase, *args: Any, **options: Any) -> CaseVerdict:
        wrong = "step 1: loss is 2 on rank 0, 1 on one device" if drawn.case.shape.window else None
        return CaseVerdict(index=0, drawn=drawn, difference=wrong)

    monkeypatch.setattr(random_run, "judge_case", judged)
    monkeypatch.setattr(
        random_run, "judge_cases", lambda cases, device: [replace(judged(c), index=i) for i, c in enumerate(cases)]
    )
    assert main(["verify", "--random", "12", "--seed", "7"]) == 4
    shown = capsys.readouterr()
    assert "differ from one device" in shown.err
    assert "    meshwright verify --case 'window=1'" in shown.out
    assert main(["verify", "--random", "12", "--seed", "7", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["layouts"] == len(document["results"]) == 12 and document["seed"] == 7
    wrong = [row for row in document["results"] if row["difference"]]
    assert len(wrong) == document["different"] > 0
    assert all(row["command"].startswith("meshwright verify --case 'window=1") for row in wrong)
    assert all(parse_case(row["case"]) == random_case(7, row["index"]) for row in document["results"])


def test_a_shrunk_case_differs_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error on the way is another finding."""

    def judged(drawn: DrawnCase, *args: Any, **options: Any) -> CaseVerdict:
        other = (
            "rank 0 of 2: KeyError: 'x'" if not drawn.case.packed else "step 1: loss is 2 on rank 0, 1 on one device"
        )
        return CaseVerdict(index=0, drawn=drawn, difference=other)

    monkeypatch.setattr(random_run, "judge_case", judged)
    start = judged(parse_case("packed=true window=3 tp=2"))
    assert format_case(smallest(start).drawn) == "packed=true"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--random", "2", "--case", "tp=2"], "give either --random or --case"),
        (["--random", "2", "--only", "tp"], "give either --random or --case, with --seed"),
        (["--random", "-1"], "--random -1 must be at least 1"),
        (["--case", "tpp=2"], "'tpp' is not known; nearest: tp"),
        (["--case", "tp=4", "--processes", "2"], "the layout has 4 processes, and at most 2 are allowed"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_one_case_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--case", "dp_replicate=2 clip=0.05"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "0  2 ranks  dp_replicate=2 clip=0.05: equal"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_word_has_no_loss_and_no_gradient(precision: str) -> None:
    """A shrunk case may end there: shares of zero are none."""
    case = parse_case(f"vocab=1 precision={precision}").case
    alone = outcome(case, ALONE)
    assert set(alone.losses) == set(alone.norms) == {0.0}
    assert wrong_alone(case, alone) is None
    assert random_run.wider_band(case, alone) == case.band


@pytest.mark.parametrize(
    ("precision", "share", "differs"),
    [("fp16", 7e-5, False), ("bf16", 5e-4, False), ("fp16", 5e-4, True), ("bf16", 4e-3, True)],
)
def test_a_gradient_that_must_be_zero_may_be_rounding_in_16_bits(precision: str, share: float, differs: bool) -> None:
    """Of a query with one key, where the gradient norm is 10; its weight may then move either way."""
    box, weight = Box(whole=(2,), offsets=(0,), sizes=(2,)), torch.full((2,), 0.5)
    names = ("step 1 gradient of q.weight", "step 1 weight q.weight")

    def outcome_of(gradient: float, moved: float) -> RankOutcome:
        tensors = {names[0]: (box, torch.tensor([gradient, 0.0])), names[1]: (box, weight + moved)}
        return RankOutcome((1.0,), (10.0,), tensors)

    first = one_device.first_difference(outcome_of(0.0, 0.0), [outcome_of(10 * share, 0.1)], BANDS[precision])
    assert (first is not None) == differs
    assert one_device.first_difference(outcome_of(0.0, 0.0), [outcome_of(10 * share, 0.0)], BANDS["fp32"]) is not None


def test_difference_reports_the_layout_before_one_device() -> None:
    case = parse_case("").case
    alone = outcome(case, ALONE)
    assert difference(case, alone, [alone]) is None
    assert difference(case, alone, [replace(alone, losses=(0.0, 0.0))]) is not None


@pytest.mark.parametrize(("element", "differs"), [(0, True), (1, False)], ids=["decided", "undecided"])
def test_a_bias_whose_gradient_is_rounding_may_move_either_way(element: int, differs: bool) -> None:
    """In 16 bits; AdamW's first update is the gradient's sign. In fp32 the sign is known."""
    gradient, weight = torch.tensor([0.1, 1e-3]), torch.tensor([1e-3, 1e-3])
    box = Box(whole=(2,), offsets=(0,), sizes=(2,))
    names = ("step 1 gradient of head.bias", "step 1 weight head.bias")

    def outcome_of(bias: Tensor) -> RankOutcome:
        return RankOutcome((1.0,), (0.1,), {names[0]: (box, gradient), names[1]: (box, bias)})

    turned = weight.clone()
    turned[element] *= -1
    first = one_device.first_difference(outcome_of(weight), [outcome_of(turned)], BANDS["bf16"])
    assert (first is not None) == differs
    assert one_device.first_difference(outcome_of(weight), [outcome_of(turned)], BANDS["fp32"]) is not None


@pytest.mark.parametrize(
    ("share", "differs"), [(1e-8, False), (0.0, True), (1e-6, True)], ids=["rounding", "zero", "more"]
)
def test_a_weight_whose_gradient_is_rounding_may_move_either_way(share: float, differs: bool) -> None:
    """Muon makes an update of any length of it; a gradient of zeros moves nothing."""
    weight, box = torch.full((2,), 0.5), Box(whole=(2,), offsets=(0,), sizes=(2,))
    names = ("step 1 gradient of k.weight", "step 1 weight k.weight")

    def outcome_of(weight: Tensor) -> RankOutcome:
        return RankOutcome((1.0,), (10.0,), {names[0]: (box, torch.full((2,), 10 * share)), names[1]: (box, weight)})

    first = one_device.first_difference(outcome_of(weight), [outcome_of(weight + 1e-3)], BANDS["fp32"])
    assert (first is not None) == differs


def test_a_tied_model_gathers_experts_before_a_block_is_repeated() -> None:
    """Without a unit after the last block nothing prefetched its experts: they were gathered inside of selective
    recomputation, which torch refuses."""
    text = "tied=true moe.experts=2 moe.top_k=1 moe.ffn=1 dp_shard=4 ep=2 zero=3 recompute=selective"
    assert judge_case(parse_case(text), settle=True).difference is None
