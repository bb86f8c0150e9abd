"""Training speed and peak memory beside `transformers`, in one run, per shape and precision.

    python -m benchmarks.train_speed [--json] [--shapes 10m,100m,300m,10m-128k] [--precisions fp32,bf16] [--seconds 60]

Four contestants: ours and transformers' own Llama, each eager and compiled, all with AdamW fused, gradient clipping at
1, the same shape, batch and number of threads. Each is a process of its own; they take turns step by step, so that
whatever else the machine does hits all alike; of a large shape the eager pair comes first, then the compiled one.
tokens/s is of the median step after two warm-up steps; memory is the peak resident size over what the process held
after its imports, of torch's compiler too, which transformers imports with its Llama. Ratios are of like with like:
eager over eager, compiled over compiled. transformers' bf16 is autocast over fp32 weights, as its Trainer does it; ours
keeps bf16 weights with fp32 masters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.train_shapes import LARGE, batch_of, shape_of

if TYPE_CHECKING:
    from meshwright.spec.model.shape import ModelShape

PAIRS = (("ours", "transformers"), ("ours-compiled", "transformers-compiled"))
CONTESTANTS = ("ours", "ours-compiled", "transformers", "transformers-compiled")
ROUNDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contestant on one shape and precision."""

    contestant: str
    tokens_per_second: float
    peak_bytes: int
    steps: int


def make_ours(shape_name: str, precision: str, rows: int, sequence: int, compiled: bool) -> Callable[[], float]:
    """A step of Meshwright's own training function."""
    import torch

    from meshwright.parallel import build_engine
    from meshwright.spec import Layout, Recipe
    from meshwright.training import device
    from meshwright.training.optimizer.optimizer import Optimizer
    from meshwright.training.optimizer.precision import DTYPES
    from meshwright.training.step.batches import Batch
    from meshwright.training.step.step import train_step

    target = torch.device("cpu")
    device.prepare(target, precision)
    shape = shape_of(shape_name)
    engine = build_engine(shape, Layout(compile="on" if compiled else "off"), dtype=DTYPES[precision])
    engine.train()
    optimizer = Optimizer(engine.parameters.items(), Recipe())
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        tokens = torch.randint(0, shape.vocab, (rows, sequence + 1), generator=generator)
        batch = Batch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), valid=rows * sequence)
        return train_step(engine, optimizer, [batch], rate=1e-4, clip=1.0, balance_loss=0.0).loss.item()

    return step


def their_config(shape: "ModelShape") -> Any:
    """transformers' configuration of a Llama of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )


def make_theirs(shape_name: str, precision: str, rows: int, sequence: int, compiled: bool) -> Callable[[], float]:
    """A step of transformers' Llama in a plain loop."""
    import torch
    from transformers import LlamaForCausalLM

    shape = shape_of(shape_name)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(their_config(shape)).train()
    model = torch.compile(plain, dynamic=False) if compiled else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    autocast = precision == "bf16"

    def step() -> float:
        tokens = torch.randint(0, shape.vocab, (rows, sequence), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def worker(contestant: str, shape: str, precision: str, rows: int, sequence: int) -> None:
    """Answers each line on stdin with one step: seconds, and peak bytes over the imports."""
    import torch
    import torch._inductor.compile_fx

    from meshwright.training.device import resident_peak_bytes

    torch.set_num_threads(os.cpu_count() or 1)
    if contestant.startswith("transformers"):
        import transformers.models.llama.modeling_llama  # noqa: F401
    else:
        import meshwright.parallel
        import meshwright.spec.presets
        import meshwright.training.step.step  # noqa: F401
    base = resident_peak_bytes()
    make = make_ours if contestant.startswith("ours") else make_theirs
    step = make(shape, precision, rows, sequence, contestant.endswith("compiled"))
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        loss = step()
        answer = {"seconds": time.perf_counter() - started, "peak": resident_peak_bytes() - base, "loss": loss}
        print(json.dumps(answer), flush=True)


def compare(
    shape: str, precision: str, rows: int, sequence: int, seconds: float, contestants: Sequence[str]
) -> list[Result]:
    """The contestants, turn by turn, until `seconds` of measured steps each or ROUNDS."""
    processes = {
        name: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.train_speed",
                "--worker",
                name,
                shape,
                precision,
                str(rows),
                str(sequence),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in contestants
    }

    def ask(name: str) -> dict[str, float]:
        process = processes[name]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        answer: dict[str, float] = json.loads(process.stdout.readline())
        return answer

    for process in processes.values():
        assert process.stdout is not None
        process.stdout.readline()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    peaks = dict.fromkeys(contestants, 0)
    for turn in range(2 + ROUNDS):
        for name in contestants:
            if turn >= 3 and sum(times[name]) > seconds:
                continue
            answer = ask(name)
            peaks[name] = int(answer["peak"])
            if turn >= 2:
                times[name].append(answer["seconds"])
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return [
        Result(
            contestant=name,
            tokens_per_second=rows * sequence / statistics.median(times[name]),
            peak_bytes=peaks[name],
            steps=len(times[name]),
        )
        for name in contestants
    ]


def report(shape: str, precision: str, seconds: float) -> dict[str, object]:
    """One table row group: the four results and the ratios the claims read."""
    rows, sequence = batch_of(shape, precision)
    groups = PAIRS if shape in LARGE else (CONTESTANTS,)
    groups_of_results = [compare(shape, precision, rows, sequence, seconds, names) for names in groups]
    results = {result.contestant: result for group in groups_of_results for result in group}
    ratios: dict[str, float] = {}
    for kind, mine, other in (
        ("eager", "ours", "transformers"),
        ("compiled", "ours-compiled", "transformers-compiled"),
    ):
        ratios[f"speed_over_{kind}"] = results[mine].tokens_per_second / results[other].tokens_per_second
        ratios[f"memory_over_{kind}"] = results[mine].peak_bytes / results[other].peak_bytes
    return {
        "shape": shape,
        "precision": precision,
        "tokens_per_step": rows * sequence,
        "results": [asdict(r) for r in results.values()],
        **ratios,
    }


def main() -> None:
    """Parse, run, print."""
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        name, shape, precision, rows, sequence = sys.argv[2:]
        worker(name, shape, precision, int(rows), int(sequence))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", default="10m,100m")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured seconds a contestant")
    options = parser.parse_args()
    reports = []
    for shape in options.shapes.split(","):
        for precision in options.precisions.split(","):
            figures = report(shape, precision, options.seconds)
            reports.append(figures)
            if not options.json:
                show(figures)
    if options.json:
        print(json.dumps({f"{r['shape']}-{r['precision']}": r for r in reports}))


def show(figures: dict[str, object]) -> None:
    """For people."""
    print(f"\n{figures['shape']} {figures['precision']}, {figures['tokens_per_step']} tokens a step")
    results = figures["results"]
    assert isinstance(results, list)
    for row in results:
        speed, peak = row["tokens_per_second"], row["peak_bytes"] / 2**20
        print(f"  {row['contestant']:24} {speed:9.0f} tokens/s  {peak:7.0f} MiB peak  ({row['steps']} steps)")
    for kind in ("eager", "compiled"):
        print(
            f"  {kind} over {kind}: speed {figures[f'speed_over_{kind}']:.3f}, "
            f"memory {figures[f'memory_over_{kind}']:.3f}"
        )


if __name__ == "__main__":
    main()
