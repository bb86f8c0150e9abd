"""Plans of serving beside published deployments, where their table is at hand; and how its rows are read."""

import csv
from pathlib import Path

import pytest

from evaluation.published_serving import MADE, ServingRow, UnknownRow, read_serving, served_model
from evaluation.separate_engines import serve_apart
from evaluation.serving_score import JudgedServing, ServingJudge, held_out, score_serving
from meshwright.planner.serving.closed_loop import Load, serve
from meshwright.planner.serving.deployment import EngineDegrees
from meshwright.planner.serving.serving_memory import weights_bytes
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec.weights.inventory import num_parameters
from tests.planner.published_tables import table
from tests.planner.test_serving_memory import deployment

COLUMNS = (
    "backend", "backend_version", "model_path", "system", "precision", "mode", "isl", "osl", "gemm_quant_mode",
    "moe_quant_mode", "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size",
    *(f"{phase}_{name}" for phase in ("prefill", "decode") for name in (
        "batch_size", "num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")),
    "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
PLAIN = {
    "backend": "vllm", "model_path": "deepseek-ai/DeepSeek-R1", "system": "H200-SXM", "precision": "fp8",
    "mode": "agg", "isl": "1024", "osl": "1024", "gemm_quant_mode": "fp8", "batch_size": "16", "tp_size": "8",
    "moe_tp_size": "8", "moe_ep_size": "1", "silicon_ttft_ms": "200", "silicon_tpot_ms": "20",
}  # fmt: skip


def read(folder: Path, **columns: str) -> ServingRow | UnknownRow:
    """One row, as the table gives it."""
    path = folder / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(dict.fromkeys(COLUMNS, "") | PLAIN | columns)
    return read_serving(path)[0]


def row(folder: Path, **columns: str) -> ServingRow:
    only = read(folder, **columns)
    assert isinstance(only, ServingRow), only
    return only


def test_degrees_that_name_the_same_gpus_are_counted_once(tmp_path: Path) -> None:
    assert row(tmp_path).decode.degrees == EngineDegrees(tp=8, expert_tp=8)
    both = row(tmp_path, tp_size="64", attention_dp_size="1", moe_ep_size="8")
    assert both.decode.degrees == EngineDegrees(tp=8, expert_ep=8) and both.load.concurrency == 16
    apart = row(tmp_path, tp_size="1", attention_dp_size="64", moe_ep_size="8", batch_size="4")
    assert apart.decode.degrees == EngineDegrees(attention_dp=8, expert_ep=8)
    assert apart.load.concurrency == 4 * 64 / 8
    small = row(tmp_path, tp_size="4", attention_dp_size="4", moe_tp_size="1", moe_ep_size="16")
    assert small.decode.degrees == EngineDegrees(attention_dp=4, expert_ep=4)
    other = row(tmp_path, tp_size="4", moe_tp_size="2", moe_ep_size="2")  # of a source that leaves it out
    assert other.decode.degrees == EngineDegrees(tp=4, expert_tp=2, expert_ep=2)


def test_lengths_vary_where_the_source_draws_them(tmp_path: Path) -> None:
    assert row(tmp_path).load.spread == 0.2
    assert row(tmp_path, isl="4096", osl="512").load.spread == 0.0


def test_drafts_follow_from_versions(tmp_path: Path) -> None:
    new = {"backend": "trtllm", "backend_version": "1.2.0rc6.post3"}
    assert row(tmp_path, **new).decode.drafted == 3
    assert (
        row(tmp_path, **new, tp_size="1", attention_dp_size="8", moe_tp_size="1", moe_ep_size="8").decode.drafted == 1
    )
    assert row(tmp_path, **new | {"backend_version": "1.2.0rc6.post2"}).decode.drafted == 0


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"model_path": "somebody/Unheard-Of-1B"}, "is not known"),
        ({"system": "TPU"}, "is not known"),
        ({"backend": "llama.cpp"}, "is not known"),
        ({"tp_size": "28", "moe_tp_size": "28"}, "does not divide the 128 heads"),
        ({"tp_size": "32", "moe_tp_size": "32"}, "more GPUs than one engine has"),
        ({"mode": "disagg"}, "requests in flight are not given"),
    ],
)
def test_what_is_not_known_is_counted_with_its_reason(tmp_path: Path, columns: dict[str, str], reason: str) -> None:
    unknown = read(tmp_path, **columns)
    assert isinstance(unknown, UnknownRow) and reason in unknown.reason
    assert score_serving([unknown]).rows == 1 and score_serving([unknown]).planned == 0


def test_prompts_apart_have_engines_of_their_own(tmp_path: Path) -> None:
    columns = {
        "mode": "disagg", "batch_size": "", "prefill_batch_size": "1", "prefill_num_workers": "2",
        "prefill_tp_size": "8", "prefill_moe_tp_size": "8", "prefill_moe_ep_size": "1", "decode_batch_size": "64",
        "decode_num_workers": "3", "decode_tp_size": "1", "decode_attention_dp_size": "8", "decode_moe_tp_size": "1",
        "decode_moe_ep_size": "8",
    }  # fmt: skip
    apart = row(tmp_path, **columns)
    assert apart.prefill is not None and apart.prefill.degrees == EngineDegrees(tp=8, expert_tp=8)
    assert apart.decode.degrees == EngineDegrees(attention_dp=8, expert_ep=8)
    assert apart.workers == (2, 3) and apart.load.concurrency == 64
    planned = ServingJudge().planned(apart)
    assert 0 < planned.per_token_s < planned.first_token_s


PUBLISHED = {
    "gpt-oss-120b": 116.8e9, "minimax-m2.5": 228.7e9, "kimi-k2.5": 1026e9, "qwen3.5-397b-a17b": 397e9, "glm-5": 744e9,
}  # fmt: skip
"""Parameters as their publishers print them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_about_the_published_parameters(name: str) -> None:
    model = served_model(f"somebody/{name}")
    assert model is not None and len(MADE) == len(PUBLISHED)
    assert sum(group.layers for group in model.groups) == model.shape.layers
    assert num_parameters(model.shape) == pytest.approx(PUBLISHED[name], rel=0.03)


def test_a_sample_of_published_rows_is_within_the_bars() -> None:
    """Every 24th row; all of them are a claim. The halves do not differ much: nothing was fitted to rows."""
    rows = read_serving(table("serving_measured.csv"))[::24]
    judged = ServingJudge().judge(rows)
    score = score_serving(judged)
    assert score.planned > 0.6 * score.rows
    assert score.per_token_median is not None and score.per_token_median <= 0.20
    assert score.first_token_median is not None and score.first_token_median <= 0.30
    assert score.rank is not None and score.rank >= 0.9
    halves = [
        score_serving([entry for entry in judged if _held(entry) == held]).per_token_median for held in (False, True)
    ]
    assert all(half is not None and half <= 0.20 for half in halves)


def _held(entry: JudgedServing | UnknownRow) -> bool:
    return held_out(entry.row if isinstance(entry, JudgedServing) else entry)


def test_published_deployments_fit_into_their_memory() -> None:
    """They ran: weights leave room for one sequence at least."""
    rows = [measured for measured in read_serving(table("serving_measured.csv")) if isinstance(measured, ServingRow)]
    seen = {measured.decode: measured for measured in rows}
    too_large = [
        measured
        for deployment, measured in seen.items()
        if weights_bytes(deployment) > 0.95 * deployment.device.memory_bytes
    ]
    assert not too_large, [(measured.number, measured.family) for measured in too_large]


def test_prompts_apart_leave_decoding_alone_and_may_be_the_narrow_place() -> None:
    engine = deployment("llama-3.1-8b")
    times, load = StepTimes(engine), Load(input_tokens=2048, output_tokens=128, concurrency=32)
    together, apart = serve(times, load), serve_apart(times, times, load, (1, 1))
    assert apart.per_token_s < together.per_token_s
    narrow = serve_apart(times, times, load, (1, 4))
    assert narrow.first_token_s > serve_apart(times, times, load, (4, 4)).first_token_s
