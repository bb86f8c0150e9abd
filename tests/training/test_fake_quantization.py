"""Weights that are rounded in every product: what is trained is what is written, and a quantized model recovers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.formats.quantized.interface import fill
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import build
from meshwright.model.fake_quantized import put_fake_quantization, straight_through
from meshwright.model.layers import Linear
from meshwright.model.quantized_weights import quantizable
from meshwright.model.transformer import build_quantized
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.oracle.one_device import BANDS, Case, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import on_one_device
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, ModelShape, Plan
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.rules.passes import learnable
from meshwright.training import loop
from meshwright.verbs.export.answer import write_directory
from tests.training.distilling import ROUTED, student_plan, taught
from tests.training.running import SHAPE, Notes, write_texts
from tests.training.running import plan as plain_plan

WIDE = replace(SHAPE, hidden=48, heads=4, kv_heads=2, ffn=64)


@pytest.mark.parametrize("scheme", learnable())
def test_a_matrix_is_what_its_codes_restore_and_learns_as_if_it_were_not_rounded(scheme: str) -> None:
    weight = torch.randn(24, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rounded = straight_through(weight, SCHEMES[scheme])
    written = quantize_matrix("w", weight, SCHEMES[scheme])
    assert torch.equal(rounded, written.dequantized()) and not torch.equal(rounded, weight)
    wanted = torch.randn(24, 48)
    (rounded * wanted).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, wanted)


def test_every_matrix_that_quantize_rounds_is_rounded_and_nothing_else() -> None:
    """Logits of a model with fake quantization are those of one whose matrices are replaced by hand."""
    model, by_hand = build(WIDE, seed=3), build(WIDE, seed=3)
    put_fake_quantization([model], WIDE, "int4-rtn")
    with torch.no_grad():
        for name, parameter in by_hand.named_parameters():
            if name in quantizable(WIDE):
                parameter.copy_(quantize_matrix(name, parameter, SCHEMES["int4-rtn"]).dequantized())
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens), by_hand(tokens))
    assert set(model.state_dict()) == set(by_hand.state_dict())


def test_products_of_eight_bits_are_those_of_the_quantized_model() -> None:
    """Rows are rounded, too: logits are those of a model that multiplies the whole numbers, and gradients pass."""
    model, scheme = build(WIDE, seed=3), SCHEMES["int8"]
    names = quantizable(WIDE)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    codes = {name: quantize_matrix(name, weights[name], scheme).tensors for name in names}
    coded = build_quantized(WIDE, dict.fromkeys(names, scheme), outlier_columns={}, dtype=torch.float32)
    fill(coded, (weights | codes).items())
    tokens = torch.arange(24).view(2, 12)
    plain = model(tokens)
    put_fake_quantization([model], WIDE, "int8")
    logits = model(tokens)
    torch.testing.assert_close(logits, coded(tokens), rtol=1e-5, atol=1e-5)
    assert float((logits - plain).detach().abs().max()) > 1e-4
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def _losses(asked: Plan) -> list[tuple[float, float]]:
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return [(step.loss, step.grad_norm) for step in watcher.steps]


def _plan(folder: Path, run: str, shape: ModelShape = WIDE, scheme: str = "int4-rtn", **recipe: Any) -> Plan:
    recipe |= {"eval_every": 0, "checkpoint_every": 0}
    asked = plain_plan(folder / "texts", folder / run, shape=shape, steps=3, fake_quantize=scheme, **recipe)
    return replace(asked, layout=Layout(compile="off", micro_batch=2))


def _under(plans: list[Plan]) -> list[list[tuple[float, float]]]:
    return [_losses(laid_plan) for laid_plan in plans]


def _laid(asked: Plan, layouts: list[dict[str, Any]]) -> list[Plan]:
    return [
        replace(asked, run=f"{asked.run}-{n}", layout=replace(asked.layout, **layout))
        for n, layout in enumerate(layouts)
    ]


def _are_those_of_one_process(asked: Plan, world: int, layouts: list[dict[str, Any]]) -> None:
    right = _losses(asked)
    curves = on_ranks(world, _under, _laid(asked, layouts))[0]
    for layout, curve in zip(layouts, curves, strict=True):
        for (loss, norm), (expected, also) in zip(curve, right, strict=True):
            assert loss == pytest.approx(expected, rel=1e-6), layout
            assert norm == pytest.approx(also, rel=1e-5), layout


TWO: list[dict[str, Any]] = [
    {"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 1, "recompute": "full"}, {"cp": 2, "zero": 0}, {"pp": 2},
    {"tp": 2}, {"tp": 2, "sp": True, "recompute": "selective"},
    {"pp": 2, "schedule": "zb-h1", "micro_batch": 1},
]  # fmt: skip
FOUR: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "micro_batch": 1},
    {"tp": 2, "sp": True, "dp_shard": 2, "zero": 3, "recompute": "full"},
]
EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2, "zero": 3, "ep_chunks": 2, "recompute": "full"},
    {"tp": 2},
    {"tp": 2, "sp": True, "ep": 2},
    {"pp": 2, "schedule": "zb-h1", "micro_batch": 1},
]


def test_layouts_train_the_same(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    _are_those_of_one_process(_plan(tmp_path, "one"), 2, TWO)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["int4-rtn", "nf4-double"])
def test_four_ranks_train_the_same(tmp_path: Path, scheme: str) -> None:
    write_texts(tmp_path / "texts")
    _are_those_of_one_process(_plan(tmp_path, "one", scheme=scheme), 4, FOUR)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["nf4", "nf4-double", "int4-rtn"])
def test_experts_are_rounded_each_by_itself_under_every_layout(tmp_path: Path, scheme: str) -> None:
    write_texts(tmp_path / "texts")
    _are_those_of_one_process(_plan(tmp_path, "one", replace(ROUTED, hidden=48), scheme), 2, EXPERTS)


def test_rounded_rows_are_those_of_one_process_under_tensor_parallelism() -> None:
    """The first forward pass, where nothing has been near a tie: its loss is that of whole rows."""
    case = Case(shape=WIDE, sequence=12, global_batch=4, fake_quantize="int8", steps=1)
    ranks = on_ranks(2, outcome, case, Layout(compile="off", tp=2))
    plain = replace(case, fake_quantize="none")
    [right, without] = [outcome(variant, Layout(compile="off")) for variant in (case, plain)]
    assert first_difference(right, ranks, BANDS["fp32"]) is None
    assert abs(without.losses[0] - right.losses[0]) > 1e-5


def test_a_split_pass_leaves_the_gradients_of_what_is_rounded() -> None:
    """Of every matrix, experts too; and they are those of a whole pass."""
    shape, gradients = replace(ROUTED, hidden=48), []
    tokens = torch.arange(24).view(2, 12)
    for splits in (False, True):
        model = build(shape, seed=3)
        put_fake_quantization([model], shape, "int4-rtn")
        with splitting() if splits else nullcontext():
            loss = model(tokens).square().mean()
            with WeightGradients() if splits else nullcontext(WeightGradients()) as queue:
                loss.backward()
            rounded = [dict(model.named_parameters())[name] for name in quantizable(shape)]
            assert all((parameter.grad is None) == splits for parameter in rounded)
            assert len(queue) >= len(rounded) * splits
            queue.run()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def _kl(before: nn.Module, after: nn.Module, rows: Tensor) -> float:
    with torch.no_grad():
        ours, theirs = (model(rows).log_softmax(-1) for model in (after, before))
        return float(F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean())


@pytest.mark.long
def test_a_model_in_three_bits_recovers_and_its_codes_are_those_that_were_trained(tmp_path: Path) -> None:
    """The teacher is the model before: its student begins with the same weights, and ends in the same scheme."""
    teacher = taught(tmp_path, WIDE, steps=60)
    write_directory(teacher, tmp_path / "hf")
    recipe: dict[str, Any] = {"fake_quantize": "int3", "learning_rate": 3e-4, "weight_decay": 0.0}
    asked = student_plan(teacher, tmp_path / "run", shape=WIDE, steps=60, **recipe)
    asked = replace(asked, init=str(tmp_path / "hf"), layout=Layout(compile="off", micro_batch=2))
    loop.run(asked, watchers=[])
    mw.quantize(teacher, "int3", tmp_path / "rounded", quality=False)
    mw.quantize(tmp_path / "run", "int3", tmp_path / "recovered", quality=False)
    read = b"".join((tmp_path / "texts" / f"{number}.txt").read_bytes() for number in range(12, 18))
    rows = torch.tensor(list(read[: len(read) // 24 * 24])).view(-1, 24)
    before, trained = mw.load(teacher).model, mw.load(tmp_path / "run").model
    rounded, recovered = (mw.load(tmp_path / name).model for name in ("rounded", "recovered"))
    put_fake_quantization([trained], WIDE, "int3")
    for name in quantizable(WIDE):
        where = name.removesuffix(".weight")
        layer, coded = trained.get_submodule(where), recovered.get_submodule(where)
        assert isinstance(layer, Linear) and isinstance(coded, Linear)
        codes = coded.quantized
        assert codes is not None and torch.equal(
            straight_through(layer.weight, SCHEMES["int3"]), codes.matrix.dequantized()
        ), name
    assert _kl(before, recovered, rows) < 0.5 * _kl(before, rounded, rows)


def test_what_cannot_be_rounded_so_is_refused(tmp_path: Path) -> None:
    asked = plain_plan(tmp_path, tmp_path / "run", shape=WIDE, fake_quantize="int4-rtn")
    cases: dict[str, dict[str, Any]] = {
        "is no scheme that weights are trained for: take one of int8, int4-rtn": {
            "recipe": replace(asked.recipe, fake_quantize="int4-gptq")
        },
        "int3 finds zeros of 32 inputs together, and layout.tp=4 cuts the 64 inputs of layers.0.mlp.down": {
            "recipe": replace(asked.recipe, fake_quantize="int3"),
            "layout": Layout(tp=4),
            "model": replace(WIDE, head_dim=32),
        },
        "take model.lora.base=int4-rtn": {"model": replace(WIDE, lora=LoRAShape(rank=2))},
        "which is not compiled: take layout.compile=off": {"layout": Layout(compile="on")},
    }
    for sentence, changes in cases.items():
        with pytest.raises(IllegalLayout, match=sentence):
            replace(asked, **changes).check()


def test_rounded_copies_are_in_plan_and_dry_run(tmp_path: Path) -> None:
    """They are kept from a pass forward to its pass back."""
    plain = plain_plan(tmp_path, tmp_path / "run", shape=replace(WIDE, hidden=256, ffn=512, head_dim=64))
    plain = replace(plain, layout=Layout(compile="off", micro_batch=2))
    asked = replace(plain, recipe=replace(plain.recipe, fake_quantize="int4-rtn"))
    simulated, planned = dry_run(asked, device="cpu").worst, predict(asked).worst
    assert simulated.peak_bytes > dry_run(plain, device="cpu").worst.peak_bytes
    assert planned.total_bytes - planned.kinds["reserve"] == pytest.approx(simulated.peak_bytes, rel=0.05)


def test_one_device_is_where_an_engine_rounds_too() -> None:
    model = build(WIDE, seed=3)
    put_fake_quantization(on_one_device(model).stages, WIDE, "nf4")
    plain = build(WIDE, seed=3)
    tokens = torch.arange(12).view(1, 12)
    assert not torch.equal(model(tokens), plain(tokens))
