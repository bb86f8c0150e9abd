"""A run that is killed again and again ends as the run that never was: the same metrics and weights, bit for bit.

    python -m benchmarks.resume [--json] [--kills 6] [--steps 60] [--seed 0]

Each kill is a SIGKILL: every other one the moment a checkpoint is being written, the rest after a random number of
steps. Afterwards resume=auto goes on. Compared are all records of metrics.jsonl but for times and memory, and all
tensors and values of the last checkpoint: weights, moments, random states, place in the data.
"""

import argparse
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

PLAN = (
    "model.layers=2",
    "model.hidden=48",
    "model.ffn=96",
    "data.limit_bytes=300000",
    "recipe.sequence=64",
    "recipe.global_batch=4",
    "recipe.dropout=0.1",
    "recipe.eval_every=20",
    "recipe.eval_sequences=4",
    "recipe.checkpoint_every=5",
)
OF_THE_MACHINE = ("second", "bytes", "mfu", "hfu")
"""Parts of names of records that no two runs share."""


def start(run: Path, steps: int) -> "subprocess.Popen[str]":
    """`meshwright train`, going on where there is something to go on from."""
    words = [*PLAN, f"recipe.steps={steps}", f"run={run}", "resume=auto"]
    command = [sys.executable, "-m", "meshwright", "train", "--json", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=run.parent)


def finish(run: Path, steps: int) -> None:
    """To the last step."""
    process = start(run, steps)
    _, complaint = process.communicate()
    if process.returncode:
        sys.exit(f"meshwright train failed: {complaint.strip()}")


def kill(run: Path, steps: int, dice: random.Random, *, saving: bool) -> int:
    """Start, and kill while a checkpoint is written or after some steps; gives the step it had reached."""
    begun = last_step(run)
    wanted = begun + dice.randint(1, max(1, min(12, steps - begun - 1)))
    process = start(run, steps)
    while process.poll() is None:
        if any(run.glob("checkpoints/.saving-*")) if saving else last_step(run) >= wanted:
            time.sleep(dice.uniform(0, 0.003))
            break
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    return last_step(run)


def last_step(run: Path) -> int:
    """Of the last whole line of the metrics; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        step: int = json.loads((run / "metrics.jsonl").read_text().split("\n")[-2])["step"]
        return step
    return 0


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics, without what belongs to the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(part in k for part in OF_THE_MACHINE)} for line in lines]


def contents(run: Path) -> dict[str, str]:
    """Hash of every tensor, and every value but times, of the last checkpoint."""
    checkpoint = max(run.glob("checkpoints/step-*"))
    values = json.loads((checkpoint / "state.json").read_text())
    digests = {"values": json.dumps(_timeless(values), sort_keys=True)}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                data = tensors.get_tensor(name).flatten().contiguous().view(torch.uint8)
                digests[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    return digests


def _timeless(values: Any) -> Any:
    if isinstance(values, dict):
        return {k: _timeless(v) for k, v in values.items() if not any(part in k for part in OF_THE_MACHINE)}
    return values


def measure(kills: int, steps: int, seed: int) -> dict[str, object]:
    """Records and tensors that differ between a run that was killed and one that was not."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        finish(whole, steps)
        killed_at = [kill(broken, steps, dice, saving=bool(number % 2)) for number in range(kills)]
        finish(broken, steps)
        ours, theirs = records(broken), records(whole)
        broken_contents, whole_contents = contents(broken), contents(whole)
    different = sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
    return {
        "killed_at_steps": killed_at,
        "records": len(theirs),
        "tensors": len(whole_contents) - 1,
        "differing_records": different,
        "differing_tensors": sum(
            broken_contents.get(name) != whole_contents.get(name)
            for name in broken_contents.keys() | whole_contents.keys()
        ),
    }


def main() -> None:
    """Print the counts, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = measure(options.kills, options.steps, options.seed)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"killed at steps {result['killed_at_steps']}")
    print(f"{result['differing_records']} of {result['records']} records differ")
    print(f"{result['differing_tensors']} of {result['tensors']} tensors differ")


if __name__ == "__main__":
    main()
