"""A load run through the engine: its memory equals plan and dry run; rates of the machine."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.kernels.c import serving_library
from meshwright.model import build
from meshwright.observe.compare.served_load import columns, dry
from meshwright.planner.cost.exchanges import links_of
from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.kernels.fitted_kernel import RateGrid
from meshwright.planner.machine import clusterfile
from meshwright.planner.machine.clusterfile import text
from meshwright.planner.serving.cached_layers import served
from meshwright.planner.serving.closed_loop import Load
from meshwright.planner.serving.deployment import MESHWRIGHT, Deployment, EngineDegrees, formats_of
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.planner.serving.step_times import StepTimes
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.spec import Cluster, presets
from meshwright.spec.errors import PlanError
from meshwright.verbs.calibrate.engine_rates import QUICK, _fit_prompts, engine_rates
from meshwright.verbs.plan_serve.answer import engine_times
from tests.verbs.toy import call, refused, train, write_texts

RATES = EngineRates(
    step_s=1e-3, sequence_s=1e-5, logit_s=1e-9, layer_s=5e-4, token_layer_s=1e-9, cached_bytes_per_s=5e9,
    prompt_flop_per_s=2e10, products=RateGrid(((1e6,), (1.0, 512.0), (64.0,), (64.0,)), (1e9, 5e10)),
)  # fmt: skip


def times(name: str = "llama-tiny", rates: EngineRates = RATES) -> StepTimes:
    device = presets.device("local")
    deployment = Deployment(
        model=served(presets.model(name)), device=device, degrees=EngineDegrees(), framework=MESHWRIGHT,
        formats=formats_of("fp32", experts=True), cache_width=4.0,
    )  # fmt: skip
    return engine_times(rates, speeds_of(device), links_of(Cluster(device=device)))(deployment)


def test_bytes_agree_in_all_three_columns() -> None:
    load = Load(input_tokens=20, output_tokens=13, concurrency=2, waves=2)
    compared = columns(times(), load)
    assert compared.planned_weights_bytes == compared.dry_weights_bytes == compared.measured_weights_bytes
    assert compared.planned_cache_bytes == compared.dry_cache_bytes == compared.measured_cache_bytes
    assert compared.errors["memory"] == 0
    measured = compared.measured
    assert 0 < measured.per_token_s < measured.first_token_s + measured.request_s
    assert measured.request_s == pytest.approx(measured.first_token_s + 12 * measured.per_token_s, rel=1e-6)


@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny"])
def test_a_dry_run_holds_what_the_real_model_and_cache_hold(name: str) -> None:
    model = build(presets.model(name), dtype=torch.float32, device=torch.device("cpu"), initialize=False)
    cache = PagedCache(model, 7, 16)
    weights, blocks = dry(model.shape, 7)
    assert weights == sum(parameter.nbytes for parameter in model.parameters())
    assert blocks == cache.bytes // 9 * 7


def test_slower_machines_are_planned_slower() -> None:
    def seconds(**changed: float) -> float:
        return times(rates=replace(RATES, **changed)).decode_s(4, 256)

    plain = seconds()
    assert seconds(step_s=2e-3) == pytest.approx(plain + 1e-3)
    assert seconds(layer_s=6e-4) == pytest.approx(plain + 6 * 1e-4)
    assert seconds(sequence_s=2e-5) == pytest.approx(plain + 4 * 1e-5)
    assert seconds(logit_s=2e-9) == pytest.approx(plain + 4 * 2048 * 1e-9)
    cache_bytes = 4 * 256 * 6 * 2 * 6 * 32 * 4.0
    assert seconds(cached_bytes_per_s=2.5e9) == pytest.approx(plain + cache_bytes / 5e9)


def test_the_cluster_file_keeps_the_rates(tmp_path: Path) -> None:
    source = tmp_path / "here.toml"
    measured = replace(_file(), serving=RATES)
    source.write_text(text(measured), encoding="utf-8")
    read_rates = clusterfile.load(source).serving
    assert read_rates is not None and replace(read_rates, products=RATES.products) == RATES
    assert read_rates.products.axes == RATES.products.axes and read_rates.products.values == RATES.products.values
    assert clusterfile.load(_written(tmp_path, text(_file()))).serving is None
    lines = text(replace(_file(), serving=replace(RATES, prompt_layer_s=1e-6))).splitlines()
    older = [line for line in lines if not line.startswith("prompt_layer_s")]
    assert len(older) == len(lines) - 1, "of a file from before it was measured"
    read = clusterfile.load(_written(tmp_path, "\n".join(older))).serving
    assert read is not None and replace(read, products=RATES.products) == replace(RATES, prompt_layer_s=0.0)
    with pytest.raises(PlanError, match=r"serving\.products is missing"):
        clusterfile.load(_written(tmp_path, text(_file()) + "\n[serving]\nstep_s = 1\n"))


def _file() -> clusterfile.ClusterFile:
    device = presets.device("h100")
    grid = RateGrid(((1.0, 8.0),) * 3, tuple(float(n + 1) * 1e9 for n in range(8)))
    flat = RateGrid(((1.0, 8.0),), (1e9, 2e9))
    core = RateGrid(((1.0, 8.0), (32.0,)), (1e9, 2e9))
    curves = clusterfile.DeviceCurves(products={4.0: grid}, passes=flat, attention=(core, core), update=flat)
    together = clusterfile.MeasuredRates(
        speeds=replace(speeds_of(device), curves=curves), links=links_of(Cluster(device=device))
    )
    cpu = replace(presets.device("local"), name="here, 2 cores", memory_bytes=2**33)
    return clusterfile.ClusterFile(device=cpu, rates={1: together})


def _written(folder: Path, words: str) -> Path:
    path = folder / "other.toml"
    path.write_text(words, encoding="utf-8")
    return path


def test_a_measured_machine_is_planned_and_run(tmp_path: Path) -> None:
    path = _written(tmp_path, text(replace(_file(), serving=RATES)))
    answer = mw.plan_serving("llama-tiny", cluster=str(path), input_length=20, output_length=5, concurrency=2)
    assert answer.best.deployment.framework.name == "meshwright" and answer.quantization == "fp32"
    assert answer.measure(waves=2).errors["memory"] == 0
    with pytest.raises(PlanError, match="measure runs"):
        mw.plan_serving("llama-3.1-8b", cluster="h100x8").measure()
    with pytest.raises(PlanError, match="framework='meshwright'"):
        mw.plan_serving("llama-tiny", cluster=str(path), framework="vllm", input_length=20, output_length=5)


@pytest.mark.parametrize("width", [4, 2])
def test_copies_of_matrices_are_planned(width: int) -> None:
    """Sizes are whole panels. Numbers stored in bf16 take half as much."""
    assert serving_library.compiled() is not None, "the tests need a C compiler"
    shape = presets.model("llama-tiny")
    model = build(shape)
    if width == 2:
        model = model.bfloat16().float()
    compared = columns(times(), Load(input_tokens=5, output_tokens=3, concurrency=1, waves=1), model.eval())
    joined = shape.hidden * (shape.hidden + 2 * shape.kv_heads * shape.head_dim + 2 * shape.ffn)
    alone = shape.hidden * (shape.hidden + shape.ffn)
    numbers = shape.layers * (joined + alone) + shape.vocab * shape.hidden
    assert compared.planned_copies_bytes == compared.measured_copies_bytes == width * numbers


def test_a_plan_leaves_room_for_copies_of_matrices(tmp_path: Path) -> None:
    """Per rank. Without them, a model of half a machine's memory would seem to fit. Codes have none."""
    path = str(_written(tmp_path, text(replace(_file(), serving=RATES))))
    asked = partial(mw.plan_serving, "llama-tiny", cluster=path, input_length=20, output_length=5, concurrency=2)
    plain = asked().best.memory
    run = columns(times(), Load(input_tokens=20, output_tokens=5, concurrency=2, waves=1))
    assert plain.copies_bytes == run.measured_copies_bytes > 0
    assert plain.usable_bytes - plain.cache_bytes >= plain.weights_bytes + plain.copies_bytes
    codes = asked(quantization="int8")
    assert codes.best.memory.copies_bytes == 0 and codes.to_dict()["best"]["copies_bytes"] == 0


def test_a_plan_says_that_times_of_codes_were_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path, text(replace(_file(), serving=RATES)))
    words = "plan", "llama-tiny", "--serve", "--cluster", path, "--input-length", "20", "--output-length", "5"
    _, plain, _ = call(capsys, *words)
    _, codes, _ = call(capsys, *words, "--quantization", "int8")
    assert "copies of matrices" in plain and "those of fp32 products" not in plain and "million parameters" in plain
    assert "those of fp32 products" in codes and "copies of matrices" not in codes


def test_a_served_run_is_compared_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes agree, times of invented rates do not: exit code 4, and 0 with a wide tolerance."""
    run = tmp_path / "run"
    assert call(capsys, *train(write_texts(tmp_path / "texts"), run, "recipe.steps=2"))[0] == 0
    path = _written(tmp_path, text(replace(_file(), serving=RATES)))
    words = ["compare", run, "--serve", "--cluster", path, "--input-length", "20", "--output-length", "5"]
    code, out, errors = call(capsys, *words, "--concurrency", "2", "--tolerance", "0.0001", "--json")
    document = json.loads(out)
    rows = {row["what"]: row for row in document["rows"]}
    assert code == 4 and not document["agrees"] and "planned" in errors
    assert all(rows[name]["planned"] == rows[name]["measured"] for name in ("weights", "keys and values"))
    assert rows["weights"]["dryrun"] == rows["weights"]["measured"] and rows["per token"]["dryrun"] is None
    assert not rows["tokens/s"]["agrees"]
    code, out, _ = call(capsys, *words, "--tolerance", "1e9")
    assert code == 0 and out.startswith("AGREES  ") and "first token" in out
    assert "--cluster" in refused(capsys, "compare", run, "--serve")
    assert "add --serve" in refused(capsys, "compare", run, "--input-length", "3")
    answer = mw.compare_serving(run, cluster=str(path), input_length=9, output_length=3, concurrency=1, tolerance=1e9)
    assert answer.agrees and len(answer.rows()) == 6 and "<table" in answer._repr_html_()


def test_rates_of_this_machine_are_numbers_above_zero() -> None:
    rates = engine_rates(replace(QUICK, steps=2, long=64))
    assert min(rates.step_s, rates.sequence_s, rates.layer_s, rates.cached_bytes_per_s, rates.prompt_flop_per_s) > 0
    assert min(rates.token_layer_s, rates.logit_s) >= 0 and min(rates.products.values) > 0
    assert rates.prompt_flop_per_s <= max(rates.products.values) * (1 + 1e-9)


def test_prompts_whose_pairs_cannot_be_told_apart_have_the_rate_of_the_best_product() -> None:
    """Linear times show no cost per pair, and attention without a cost would be planned as free."""
    assert _fit_prompts([(16, 1.0), (32, 2.0), (64, 4.0)], least_pair_s=1e-6)[2] == 1e-6
    curved = [(n, 3.0 + 0.5 * n + 0.25 * n**2) for n in (16, 32, 64)]
    assert _fit_prompts(curved, least_pair_s=1e-6) == pytest.approx((3.0, 0.5, 0.25))
