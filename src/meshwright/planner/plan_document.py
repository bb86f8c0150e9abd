"""A prediction as the shared JSON document of `plan` (docs/planner.md)."""

from dataclasses import asdict, fields
from typing import Any

from meshwright.planner.caveats import caveats
from meshwright.planner.search.ranking import Ranking
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.error_ranges import fit_probability, ranges
from meshwright.planner.step.prediction import Prediction
from meshwright.planner.time.timeline import StepTime
from meshwright.spec.plan import as_document


def document(found: Prediction) -> dict[str, Any]:
    """Predicted memory, traffic and time of one plan."""
    worst, time, said = found.worst, found.time, ranges(found)
    return {
        "source": "predicted",
        "plan": as_document(found.plan),
        "peak_bytes": round(found.peak_bytes),
        "peak_rank": worst.pp_rank * (found.plan.layout.world // found.plan.layout.pp),
        "memory": [{"kind": kind, "bytes": round(size)} for kind, size in worst.kinds.items() if size],
        "host_bytes": round(found.host_bytes),
        "node_bytes": round(found.node_bytes),
        "traffic": [
            {"axis": sent.axis, "collective": sent.collective, "bytes": sent.sent_bytes, "calls": sent.calls}
            for sent in found.traffic(worst.pp_rank)
        ],
        "time": [
            {"what": part.name.removesuffix("_s"), "seconds": getattr(time, part.name)} for part in fields(StepTime)
        ],
        "step_seconds": found.step_s,
        "tokens_per_second_per_device": found.tokens_per_s_per_device,
        "mfu_causal": found.mfu(causal=True),
        "mfu_full": found.mfu(causal=False),
        "hfu": found.hfu,
        "bubble_fraction": found.bubble_fraction,
        "fit_probability": said.fit_probability,
        "range": said.document(),
        **({} if found.executions is None else {"execution": found.executions.document()}),
        "caveats": list(caveats(found)),
    }


def ranked(found: Ranking) -> dict[str, Any]:
    """What a search adds to the document of the layout that it recommends: all that are listed, the fastest first."""
    return {
        "layouts": [
            {
                "layout": asdict(one.plan.layout),
                "peak_bytes": round(one.peak_bytes),
                "step_seconds": one.step_s,
                "tokens_per_second_per_device": one.tokens_per_s_per_device,
                "mfu_causal": one.mfu(causal=True),
                "mfu_full": one.mfu(causal=False),
                "bubble_fraction": one.bubble_fraction,
                "tight": is_bold(one),
                "fit_probability": fit_probability(one),
            }
            for one in sorted(found.best, key=lambda one: one.step_s)
        ],
        "rejected": [
            {"layout": asdict(one.layout), "reason": f"does not fit: {one.reason}", "peak_bytes": round(one.peak_bytes),
             "count": one.count}
            for one in found.rejected
        ],
        "legal": found.legal,
        "too_large": found.too_large,
        "slower": found.slower,
    }  # fmt: skip
