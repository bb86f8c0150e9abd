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
    from meshwright.api.comparing import compare, report
    from meshwright.api.config_planning import plan_from
    from meshwright.api.distilling import distill
    from meshwright.api.dry_runs import dry_run
    from meshwright.api.evaluation import evaluate
    from meshwright.api.exploring import explore
    from meshwright.api.model_opening import load
    from meshwright.api.planning import plan
    from meshwright.api.profiling import profile
    from meshwright.api.quantizing import quantize
    from meshwright.api.renting import rent
    from meshwright.api.renting_serving import rent_serving
    from meshwright.api.serve_planning import plan_serving
    from meshwright.api.serving_comparison import compare_serving
    from meshwright.api.sharded_serving import sharded_engine
    from meshwright.api.training_run import train, tune
    from meshwright.serving.engine.answers.request_options import RequestOptions
    from meshwright.serving.engine.engine_options import EngineOptions
    from meshwright.serving.engine.speculation import Speculation
    from meshwright.serving.http.server_options import ServerLimits
    from meshwright.spec.errors import DoesNotFit, MeshwrightError, PlanError

__version__ = "0.1.0"

__all__ = [
    "DoesNotFit", "EngineOptions", "MeshwrightError", "PlanError", "RequestOptions", "ServerLimits", "Speculation",
    "compare", "compare_serving", "distill", "dry_run", "evaluate", "explore", "load", "plan", "plan_from",
    "plan_serving", "profile", "quantize", "rent", "rent_serving", "report", "sharded_engine", "train", "tune",
]  # fmt: skip

__getattr__ = lazy_names(__name__, {
    "compare": "api.comparing", "distill": "api.distilling", "dry_run": "api.dry_runs", "evaluate": "api.evaluation",
    "explore": "api.exploring",
    "load": "api.model_opening", "plan": "api.planning", "plan_from": "api.config_planning",
    "plan_serving": "api.serve_planning",
    "compare_serving": "api.serving_comparison",
    "rent": "api.renting", "rent_serving": "api.renting_serving",
    "profile": "api.profiling", "quantize": "api.quantizing", "report": "api.comparing",
    "sharded_engine": "api.sharded_serving", "train": "api.training_run", "tune": "api.training_run",
    "EngineOptions": "serving.engine.engine_options", "RequestOptions": "serving.engine.answers.request_options",
    "ServerLimits": "serving.http.server_options", "Speculation": "serving.engine.speculation",
    "DoesNotFit": "spec.errors", "MeshwrightError": "spec.errors", "PlanError": "spec.errors",
})  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
