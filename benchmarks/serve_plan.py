"""Plans of serving against the engine on this machine: planned, dry run and measured of ten loads, after `calibrate`.

    python -m benchmarks.serve_plan [--json]

The machine's rates are measured first, as `meshwright calibrate` does. Models have weights of chance, in fp32, with one
thread. Times are of the processor. Each load is played several times, in turns with the others: it makes the same steps
each time, and of each step the least time counts, here as in `calibrate`, so that other programs matter little. An
error is planned / measured - 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from meshwright.model import build
from meshwright.observe.compare.served_load import LoadRun, ServingColumns, columns_of
from meshwright.planner.cost.exchanges import links_of
from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.serving.cached_layers import served
from meshwright.planner.serving.closed_loop import Load
from meshwright.planner.serving.deployment import MESHWRIGHT, Deployment, EngineDegrees, formats_of
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec import Cluster, presets
from meshwright.verbs.calibrate.engine_rates import QUICK, engine_rates
from meshwright.verbs.plan_serve.answer import engine_times

LOADS = (
    ("llama-tiny", 64, 32, 1), ("llama-tiny", 128, 64, 4), ("llama-tiny", 256, 32, 8), ("llama-tiny", 32, 64, 16),
    ("llama-10m", 64, 32, 1), ("llama-10m", 256, 48, 2), ("llama-10m", 128, 48, 4), ("llama-10m", 512, 32, 4),
    ("llama-10m", 64, 48, 8), ("llama-10m", 128, 32, 16),
)  # fmt: skip
"""Model, tokens of a prompt and of an answer, requests in flight."""
WAVES, TURNS = 4, 4


def compared(*, quick: bool = False) -> list[tuple[str, ServingColumns]]:
    """Every load with its three columns."""
    torch.set_num_threads(1)
    rates = engine_rates(QUICK if quick else None, time.process_time)
    device = presets.device("local")
    timed = engine_times(rates, speeds_of(device), links_of(Cluster(device=device)))
    turns = range(1 if quick else TURNS)
    played = [_Played(*load, waves=2 if quick else WAVES) for load in (LOADS[:2] if quick else LOADS)]
    for _ in turns:
        for played_load in played:
            played_load.play()
    return [(played_load.words, played_load.columns(timed)) for played_load in played]


class _Played:
    """A load, and the least time of each of its steps."""

    def __init__(self, name: str, prompt: int, answer: int, places: int, waves: int) -> None:
        self.words = f"{name}, {prompt} in, {answer} out, {places} in flight"
        self._shape = presets.model(name)
        self._load = Load(input_tokens=prompt, output_tokens=answer, concurrency=places, waves=waves)
        model = build(self._shape, dtype=torch.float32, device=torch.device("cpu"))
        self._run, self._least = LoadRun(model, self._load), list[float]()

    def play(self) -> None:
        """Once more."""
        seconds = self._run.play(time.process_time)
        self._least = [min(pair) for pair in zip(seconds, self._least or seconds, strict=True)]

    def columns(self, timed: Callable[[Deployment], StepTimes]) -> ServingColumns:
        """Planned, dry run and measured."""
        deployment = Deployment(
            model=served(self._shape), device=presets.device("local"), degrees=EngineDegrees(), framework=MESHWRIGHT,
            formats=formats_of("fp32", experts=False), cache_width=4.0,
        )  # fmt: skip
        return columns_of(timed(deployment), self._load, self._run, self._least)


def main() -> int:
    """Print a line for each load, and the worst errors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows = compared(quick=options.quick)
    errors = {name: [abs(row.errors[name]) for _, row in rows] for name in rows[0][1].errors}
    worst = {name: max(values) for name, values in errors.items()}
    document = {
        "loads": [{"load": name, **row.errors} for name, row in rows],
        "worst": worst,
        "median": {name: median(values) for name, values in errors.items()},
        "dry_run_exact": all(row.dry_weights_bytes == row.measured_weights_bytes for _, row in rows),
    }
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    for name, row in rows:
        print(
            f"{name:<44} memory {row.errors['memory']:+.1%}   tokens/s {row.planned.output_tokens_per_s:,.0f} planned, "
            f"{row.measured.output_tokens_per_s:,.0f} measured ({row.errors['tokens_per_second']:+.1%})   first token "
            f"{row.errors['first_token']:+.1%}, per token {row.errors['per_token']:+.1%}"
        )
    print("worst: " + ", ".join(f"{name} {value:.1%}" for name, value in worst.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
