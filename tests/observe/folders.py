"""Run folders as training, dry run and profile leave them, made from the planner's own numbers: so they agree."""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meshwright import __version__, planfile
from meshwright.planner.explain import document
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.layout.schedule import schedule
from meshwright.spec.memory.held import STATES

PLAN = Plan(
    model=replace(presets.model("llama-tiny"), name="small", layers=4),
    layout=Layout(pp=2, tp=2, micro_batch=1),
    recipe=Recipe(sequence=512, global_batch=4, steps=40, precision="fp32"),
    cluster=presets.cluster("h100x4", 1),
)
ALONE = replace(PLAN, layout=Layout(micro_batch=2))


def rank_records(plan: Plan) -> list[dict[str, Any]]:
    """What each pipeline place holds and sends, as a dry run would tell it."""
    prediction = predict(plan)
    return [
        {
            "rank": rank,
            "peak_bytes": round(memory.total_bytes - memory.kinds["reserve"]),
            "when": "step 2, BW 0 1",
            "memory": [
                {"kind": k, "bytes": round(size)} for k, size in memory.kinds.items() if size and k != "reserve"
            ],
            "traffic": [
                {"axis": sent.axis, "collective": sent.collective, "bytes": sent.sent_bytes, "calls": sent.calls}
                for sent in prediction.traffic(stage)
            ],
            "activations": [{"where": "layers.*.mlp mm", "bytes": 4000}, {"where": "embed add", "bytes": 100}],
            "largest": [{"bytes": 900, "kind": "logits", "line": "model/transformer.py:3 forward", "operation": "mm"}],
            "passes": [
                {"name": name, "memory": [{"kind": "parameters", "bytes": 10}, {"kind": "activations", "bytes": n}]}
                for n, name in enumerate(("build", "step 1", "F 0 0", "BW 0 0", "step 2", "F 0 0", "BW 0 0"))
            ],
        }
        for stage, (rank, memory) in enumerate(zip(pipeline_ranks(plan.layout), prediction.memory, strict=True))
    ]


def dry_run_json(plan: Plan) -> dict[str, Any]:
    """dryrun.json."""
    return {"source": "dryrun", "plan": asdict(plan), "device": "cuda", "ranks": rank_records(plan), "notes": [],
            "environment": {"meshwright": __version__}}  # fmt: skip


def profile_json(plan: Plan) -> dict[str, Any]:
    """profile.json: what was planned, came."""
    content = document(predict(plan)) | {"source": "measured", "device": "cuda", "ranks": rank_records(plan)}
    for stage, rank in enumerate(content["ranks"]):
        rank["memory_timeline"] = [{**moment, "step": 1} for moment in rank.pop("passes")]
        rank["spans"] = list(spans(plan, stage))
    return json.loads(json.dumps(content))  # type: ignore[no-any-return]


def spans(plan: Plan, stage: int) -> list[dict[str, Any]]:
    """Two steps of passes of a hundredth of a second, and an optimizer behind each."""
    actions = schedule("1f1b", plan.layout.pp, plan.micro_batches)[stage] if plan.layout.pp > 1 else ()
    rows, now = [], 5.0
    for _ in range(2):
        for action in actions:
            rows.append({"name": action.kind, "stage": action.stage, "micro_batch": action.micro_batch,
                          "start_s": now, "end_s": now + 0.01})  # fmt: skip
            now += 0.01
        rows.append({"name": "optimizer", "start_s": now, "end_s": now + 0.005})
        now += 0.02
    return rows


def metric_rows(steps: int, loss: float = 8.0) -> list[dict[str, Any]]:
    """Records of training, with an evaluation every ten steps."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        now = loss / step**0.1 + 0.05 * (step % 3)
        rows.append({
            "step": step, "loss": now, "grad_norm": 3 / step**0.5, "lr": 1e-3 / step, "tokens": 256 * step,
            "tokens_per_second": 1000.0 + step, "seconds": 0.2 * step, "step_seconds": 0.2 + (step == 1),
            "data_wait_seconds": 1e-4, "mfu_causal": 0.4, "mfu_full": 0.42, "hfu": 0.45, "global_batch": 4,
        })  # fmt: skip
        if step % 10 == 0:
            rows.append({"step": step, "kind": "eval", "loss": now + 0.1, "bits_per_byte": now / 2, "tokens": 99})
    return rows


def write_run(folder: Path, plan: Plan = PLAN, *, steps: int = 40, loss: float = 8.0, **files: Any) -> Path:
    """A run folder; `files`: documents by name (ledger, dryrun, profile), None = without. By default a ledger only."""
    folder.mkdir(parents=True)
    planfile.write(plan, folder / "plan.yaml")
    if steps:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metric_rows(steps, loss)))
    for name, content in {"ledger": ledger_json(plan), **files}.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text)
    return folder


def ledger_json(plan: Plan) -> dict[str, Any]:
    """ledger.json of a run on GPUs."""
    ranks = [
        deepcopy({key: rank[key] for key in ("rank", "memory", "traffic", "peak_bytes")}) for rank in rank_records(plan)
    ]
    for rank in ranks:
        rank["memory"] = [held for held in rank["memory"] if held["kind"] in STATES]
    peaks = [rank["peak_bytes"] for rank in ranks for _ in range(plan.layout.world // plan.layout.pp)]
    return {"source": "measured", **ranks[0], "step": 40, "ranks": ranks, "peaks": peaks, "device": "cuda",
            "environment": {"device": "NVIDIA H100", "torch": "2.13.0", "cuda": None}}  # fmt: skip
