"""What the ledgers of a run cost: steps with and without them, in turn, in the same processes.

    python -m benchmarks.ledger_cost [--json] [--steps 40]

Two ranks of tensor and sequence parallelism, whose many small collectives are all counted. Without: nothing is told and
nothing is looked at; the call of an empty function stays at each collective, some 0.1 us. Seconds are of the processes'
own CPU time, since others use the machine.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from meshwright.observe.program import TrainingProgram
from meshwright.observe.ranks import on_ranks
from meshwright.observe.spans import replaced
from meshwright.parallel import make_mesh
from meshwright.parallel.traffic import Traffic
from meshwright.spec import Layout, ModelShape, Plan, Recipe
from meshwright.training.run_ledger import StepLedger

SHAPE = ModelShape(name="small", vocab=2048, layers=6, hidden=256, heads=4, kv_heads=4, ffn=704, max_positions=512)
PLAN = Plan(
    model=SHAPE,
    recipe=Recipe(sequence=128, global_batch=8, document_mask=False),
    layout=Layout(tp=2, sp=True, micro_batch=2, compile="off"),
)


def steps(count: int) -> tuple[list[float], list[float], int]:
    """CPU seconds of each step with and without ledgers, on one rank; collectives of a step."""
    torch.set_num_threads(1)
    program = TrainingProgram(
        plan=PLAN, mesh=make_mesh(PLAN.layout), device=torch.device("cpu"), told=lambda part: None, initialize=True
    )
    program.build()
    ledger = StepLedger(program.state)
    with_ledgers: list[float] = []
    without: list[float] = []
    for number in range(1, 2 * count + 5):
        dist.barrier()
        counted = number % 2 == 0
        began = time.process_time()
        if counted:
            ledger.begin()
            program.step(number, len(program.batches))
            ledger.end(number)
        else:
            with _untold():
                program.step(number, len(program.batches))
        if number > 4:
            (with_ledgers if counted else without).append(time.process_time() - began)
    return with_ledgers, without, sum(calls for calls, _ in ledger.sent.values())


def _untold() -> Any:
    return replaced(Traffic, "tell", lambda *_: None)


def main() -> None:
    """Both ranks' medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    ranks = on_ranks(2, steps, options.steps, limit_s=600)
    on, off = (statistics.median([one for rank in ranks for one in rank[n]]) for n in (0, 1))
    found = {"with_seconds": on, "without_seconds": off, "cost": on / off - 1, "collectives_a_step": ranks[0][2]}
    print(json.dumps(found) if options.json else found)


if __name__ == "__main__":
    main()
