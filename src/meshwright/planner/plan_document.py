"""A prediction as the shared JSON document of `plan` (docs/planner.md)."""

from dataclasses import asdict, fields
from typing import Any

from meshwright.planner.caveats import caveats
from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.error_ranges import fit_probability, ranges
from meshwright.planner.step.prediction import Prediction
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.plan.plan import as_document


def document(prediction: Prediction) -> dict[str, Any]:
    """Return predicted memory, traffic and time of one plan."""
    worst, time, error_ranges = prediction.worst, prediction.time, ranges(prediction)
    return {
        "source": "predicted",
        "plan": as_document(prediction.plan),
        "peak_bytes": round(prediction.peak_bytes),
        "peak_rank": worst.pp_rank * (prediction.plan.layout.world // prediction.plan.layout.pp),
        "memory": [{"kind": kind, "bytes": round(size)} for kind, size in worst.kinds.items() if size],
        "host_bytes": round(prediction.host_bytes),
        "node_bytes": round(prediction.node_bytes),
        "traffic": [
            {"axis": sent.axis, "collective": sent.collective, "bytes": sent.sent_bytes, "calls": sent.calls}
            for sent in prediction.traffic(worst.pp_rank)
        ],
        "time": [
            {"what": part.name.removesuffix("_s"), "seconds": getattr(time, part.name)} for part in fields(StepTime)
        ],
        "step_seconds": prediction.step_s,
        "tokens_per_second_per_device": prediction.tokens_per_s_per_device,
        "mfu_causal": prediction.mfu(causal=True),
        "mfu_full": prediction.mfu(causal=False),
        "hfu": prediction.hfu,
        "bubble_fraction": prediction.bubble_fraction,
        "fit_probability": error_ranges.fit_probability,
        "range": error_ranges.document(),
        **({} if prediction.executions is None else {"execution": prediction.executions.document()}),
        "caveats": list(caveats(prediction)),
    }


def ranked(ranking: Ranking) -> dict[str, Any]:
    """Return what a search adds to the document of its recommendation: all listed layouts, the fastest first."""
    return {
        "layouts": [
            {
                "layout": asdict(prediction.plan.layout),
                "peak_bytes": round(prediction.peak_bytes),
                "step_seconds": prediction.step_s,
                "tokens_per_second_per_device": prediction.tokens_per_s_per_device,
                "mfu_causal": prediction.mfu(causal=True),
                "mfu_full": prediction.mfu(causal=False),
                "bubble_fraction": prediction.bubble_fraction,
                "tight": is_bold(prediction),
                "fit_probability": fit_probability(prediction),
            }
            for prediction in sorted(ranking.best, key=lambda prediction: prediction.step_s)
        ],
        "rejected": [
            {"layout": asdict(group.layout), "reason": f"does not fit: {group.reason}",
             "peak_bytes": round(group.peak_bytes), "count": group.count}
            for group in ranking.rejected
        ],
        "legal": ranking.legal,
        "too_large": ranking.too_large,
        "slower": ranking.slower,
    }  # fmt: skip
