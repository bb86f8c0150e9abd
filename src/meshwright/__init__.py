"""Meshwright plans, trains, shrinks and serves transformer language models.

    import meshwright as mw

    answer = mw.plan("llama-3.1-8b", cluster="h100x8", nodes=4)
    answer.best, answer.alternatives, answer.why
    answer.save("plan.yaml")

    mw.dry_run("plan.yaml")
    run = mw.train(data="texts", recipe={"steps": 200})
    run.load().generate("def ")

Every function answers with a frozen object that a notebook shows, and raises what `meshwright.spec.errors` lists.
Nothing is loaded before it is used; docs/python.md has a page on it.
"""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.interface.trained.opening import load
    from meshwright.serving.engine.answers.request_options import RequestOptions
    from meshwright.serving.engine.engine_options import EngineOptions
    from meshwright.serving.engine.speculation import Speculation
    from meshwright.serving.http.server_options import ServerLimits
    from meshwright.spec.errors import DoesNotFit, MeshwrightError, PlanError
    from meshwright.verbs.compare.answer import compare, compare_serving
    from meshwright.verbs.distill.answer import distill
    from meshwright.verbs.dryrun.answer import dry_run
    from meshwright.verbs.eval.answer import evaluate
    from meshwright.verbs.explore.answer import explore
    from meshwright.verbs.plan.answer import plan
    from meshwright.verbs.plan.sweep import plan_sweep
    from meshwright.verbs.plan_formula.answer import plan_formula
    from meshwright.verbs.plan_from.answer import plan_from
    from meshwright.verbs.plan_serve.answer import plan_serving
    from meshwright.verbs.profile.answer import profile
    from meshwright.verbs.quantize.answer import quantize
    from meshwright.verbs.rent.answer import rent, rent_serving
    from meshwright.verbs.report.answer import report
    from meshwright.verbs.runs.answer import runs
    from meshwright.verbs.serve.sharded import sharded_engine
    from meshwright.verbs.train.answer import train
    from meshwright.verbs.tune.answer import tune

__version__ = "0.1.0"

__all__ = [
    "DoesNotFit", "EngineOptions", "MeshwrightError", "PlanError", "RequestOptions", "ServerLimits", "Speculation",
    "compare", "compare_serving", "distill", "dry_run", "evaluate", "explore", "load", "plan", "plan_formula",
    "plan_from", "plan_serving", "plan_sweep", "profile", "quantize", "rent", "rent_serving", "report",
    "runs", "sharded_engine", "train", "tune",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "compare": "verbs.compare.answer", "distill": "verbs.distill.answer", "dry_run": "verbs.dryrun.answer",
    "evaluate": "verbs.eval.answer", "explore": "verbs.explore.answer", "load": "interface.trained.opening",
    "plan": "verbs.plan.answer", "plan_formula": "verbs.plan_formula.answer", "plan_sweep": "verbs.plan.sweep",
    "plan_from": "verbs.plan_from.answer", "plan_serving": "verbs.plan_serve.answer",
    "compare_serving": "verbs.compare.answer", "rent": "verbs.rent.answer", "rent_serving": "verbs.rent.answer",
    "profile": "verbs.profile.answer", "quantize": "verbs.quantize.answer", "report": "verbs.report.answer",
    "runs": "verbs.runs.answer",
    "sharded_engine": "verbs.serve.sharded", "train": "verbs.train.answer", "tune": "verbs.tune.answer",
    "EngineOptions": "serving.engine.engine_options", "RequestOptions": "serving.engine.answers.request_options",
    "ServerLimits": "serving.http.server_options", "Speculation": "serving.engine.speculation",
    "DoesNotFit": "spec.errors", "MeshwrightError": "spec.errors", "PlanError": "spec.errors",
})  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
