"""Draw a pipeline's schedule as letters, a column for each unit of time, and count what is idle.

    python examples/pipeline_schedules.py                                   # GPipe: 4 stages, 4 micro-batches
    python examples/pipeline_schedules.py zb-h1 --micro-batches 8

F is a forward pass, B the gradient of the input, W those of the weights: one unit each. The number is that of the
micro-batch, which passes a rank once for each of its stages. A point is idle time. The schedules are
those that training runs.
"""

import argparse

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.replay import replay
from meshwright.spec.layout.schedule import KINDS, check, schedule


def main() -> None:
    """Print a row for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", default="afab", choices=KINDS)
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    name, ranks, batches = options.name, options.stages, options.micro_batches
    virtual = KINDS[name].stages
    try:
        check(name, ranks, batches, virtual)
    except IllegalLayout as error:
        parser.error(str(error))
    played = replay(schedule(name, ranks, batches, virtual))
    width = 2 + len(str(batches - 1))
    for rank, spans in enumerate(played.spans):
        cells = ["."] * round(played.total_s)
        for span in spans:
            kinds = "BW" if span.action.kind == "BW" else span.action.kind
            for unit, kind in enumerate(kinds, round(span.start_s)):
                cells[unit] = f"{kind}{span.action.micro_batch}"
        print(f"rank {rank}  " + "".join(f"{cell:<{width}}" for cell in cells))
    work = 3 * batches * virtual
    idle = round(played.total_s) - work
    print(f"\n{name}: {work} units of work and {idle} idle ones on each rank, idle / work = {idle / work:.3f}")
    print("F: forward, B: gradient of the input, W: gradients of weights, .: idle")
    print(f"micro-batches alive at most, by rank: {', '.join(map(str, played.in_flight))}")


if __name__ == "__main__":
    main()
