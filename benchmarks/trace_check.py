"""Whether any rank of any layout can deadlock: the trace checker over many plans.

    python -m benchmarks.trace_check [--part schedules|layouts|presets] [--json]

schedules   every pipeline schedule at pp 2, 4 and 8 with p to 3p micro-batches, over the engine's executor; stages are
            one product each, since messages do not depend on what a stage computes
layouts     every layout that `verify` tries, all ranks in full
presets     the planner's best layout of five large models on up to 1,024 GPUs, all ranks

Seconds are of the clock, with as many processes as cores.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.linear.linear import linear
from meshwright.observe.check.events import RankTrace
from meshwright.observe.check.recorder import TraceRecorder
from meshwright.observe.check.recording import record_ranks, record_world
from meshwright.observe.check.rules import CheckReport, check
from meshwright.observe.oracle.feature_matrix import Trial, trials
from meshwright.observe.oracle.features import shrink
from meshwright.observe.program import TrainingProgram
from meshwright.observe.ranks import in_subprocesses
from meshwright.parallel import make_mesh
from meshwright.planner.explain import layout_words
from meshwright.planner.search.ranking import search
from meshwright.planner.step.predict import build_estimator
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout.schedule import KINDS, NAMES, refusal

DEGREES = (2, 4, 8)
LARGE = (
    ("llama-3.1-8b", 8, 512),
    ("llama-3.1-70b", 64, 1024),
    ("llama-3.1-405b", 128, 2048),
    ("mixtral-8x7b", 16, 512),
    ("deepseek-v3", 128, 2048),
)
"""(model, nodes of eight GPUs, sequences a step)."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A micro-batch that only has a size."""

    size: tuple[int, int] = (1, 16)


def schedules(degrees: Sequence[int] = DEGREES) -> Iterator[dict[str, Any]]:
    """A row for each schedule and degree."""
    tasks = [(name, pp) for pp in degrees for name in NAMES]
    for number, rows in in_subprocesses(_schedule, tasks):
        name, pp = tasks[number]
        yield {"name": f"{name} pp={pp}", "cases": len(rows), **_summed(rows)}


def _schedule(name: str, pp: int) -> list[CheckReport]:
    """All numbers of micro-batches from pp to 3 pp."""
    torch.set_num_threads(1)
    virtual = KINDS[name].stages
    layers = pp * virtual
    counts = [m for m in range(pp, 3 * pp + 1) if refusal(name, pp, m, virtual) is None]
    layout = Layout(
        pp=pp,
        vp=virtual,
        schedule=name,  # type: ignore[arg-type]  # the keys of KINDS are its words
        zero=0,
        micro_batch=1,
        compile="off",
    )
    shape = replace(shrink("llama-3.1-8b"), layers=layers)
    plan = Plan(model=shape, layout=layout, recipe=Recipe(sequence=16, global_batch=counts[0]))
    worlds: list[list[RankTrace]] = [[] for _ in counts]
    with compat.fake_tensors(), simulate_device("cuda"):
        for rank in range(pp):
            with compat.fake_world(rank, pp):
                program = TrainingProgram(
                    plan=plan,
                    mesh=make_mesh(layout),
                    device=torch.device("cpu"),
                    on_part=lambda part: None,
                    routing=1.0,
                )
                program.build()
                for world, count in zip(worlds, counts, strict=True):
                    world.append(_pipeline(program, rank, count))
    return [check(world) for world in worlds]


def _pipeline(program: TrainingProgram, rank: int, count: int) -> RankTrace:
    engine = program.state.engine
    assert engine.pipeline is not None
    for number in engine.pipeline.stages:
        last = number == len(engine.pipeline.placement) - 1
        weight = next(p for n, p in engine.parameters.items() if n.endswith("attention.o.weight"))
        engine.pipeline.stages[number] = _Toy(weight, last=last)
    recorder = TraceRecorder()
    recorder.part = f"{count} micro-batches"
    with recorder.listening():
        engine.pipeline.run([Tokens()] * count)
        engine.pipeline.evaluate([Tokens()] * count)
    return RankTrace(rank, recorder.trace(), recorder.communicators(program.mesh))


class _Toy:
    """A stage of one product."""

    def __init__(self, weight: Tensor, *, last: bool) -> None:
        self.weight, self.last = weight, last

    def __call__(self, x: Tensor | None, tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
        """As parallel.pipeline.executor.Stage."""
        x = torch.ones(*tokens.size, self.weight.shape[1]) if x is None else x
        out = linear(x, self.weight)
        return (None, out.sum()) if self.last else (out, None)


def layouts(limit: int = 0) -> Iterator[dict[str, Any]]:
    """A row for each layout of `verify`."""
    chosen = [trial for trial in trials()[0] if trial.layout.world > 1]
    if limit:
        chosen = chosen[:: max(1, len(chosen) // limit)]
    for number, checked in in_subprocesses(_layout, [(trial,) for trial in chosen]):
        yield {"name": chosen[number].title, "cases": 1, **_summed([checked])}


def _layout(trial: Trial) -> CheckReport:
    case = trial.case
    recipe = Recipe(
        sequence=case.sequence, global_batch=case.global_batch, precision=trial.precision,  # type: ignore[arg-type]  # one of its words
        document_mask=trial.packed,
    )  # fmt: skip
    layout = replace(trial.layout, compile="off")
    plan = Plan(model=case.shape, layout=layout, recipe=recipe)
    return check(record_ranks(plan, range(layout.world), "cuda", 1.0, True).world())


def best(model: str, nodes: int, batch: int) -> Plan:
    """The planner's first choice on nodes of eight H100s."""
    recipe = Recipe(sequence=4096, global_batch=batch, precision="bf16", document_mask=False)
    plan = Plan(model=presets.model(model), recipe=recipe, cluster=presets.cluster("h100x8", nodes))
    ranking = search(build_estimator(plan), plan, listed=1)
    return replace(plan, layout=ranking.best[0].plan.layout)


def large(chosen: Sequence[tuple[str, int, int]] = LARGE) -> Iterator[dict[str, Any]]:
    """A row for each model."""
    for model, nodes, batch in chosen:
        plan = best(model, nodes, batch)
        started = time.perf_counter()
        traces = record_world(plan, device="cuda")
        recorded = time.perf_counter()
        checked = check(traces)
        yield {
            "name": f"{model} on {plan.layout.world}: {layout_words(plan.layout)}", "cases": 1, **_summed([checked]),
            "seconds": time.perf_counter() - started, "recorded_s": recorded - started,
        }  # fmt: skip


def _summed(checks: Sequence[CheckReport]) -> dict[str, Any]:
    return {
        "ranks": sum(check.ranks for check in checks), "operations": sum(check.operations for check in checks),
        "programs": sum(check.programs for check in checks),
        "violations": sum(len(check.violations) for check in checks),
        "first": next((v.text for check in checks for v in check.violations), ""),
    }  # fmt: skip


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "schedules": schedules,
    "layouts": layouts,
    "presets": large,
}


def main() -> None:
    """All parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--only", type=int, help="presets: this one of them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    answer: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    for part in options.part or PARTS:
        started, rows = time.perf_counter(), []
        made = large(LARGE[options.only :][:1]) if part == "presets" and options.only is not None else PARTS[part]()
        for row in made:
            rows.append(row)
            if not options.json:
                size = f"{row['ranks']} ranks, {row['operations']} operations"
                print(f"{row['name']}: {row['violations']} violations, {size}", flush=True)
                if row["first"]:
                    print(row["first"])
        totals = {key: sum(row[key] for row in rows) for key in ("cases", "ranks", "operations", "violations")}
        slowest_s = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        answer[part] = totals | {"seconds": time.perf_counter() - started, "slowest_s": slowest_s, "rows": rows}
        if not options.json:
            print(part, totals, f"{answer[part]['seconds']:.1f} s")
    if options.json:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
