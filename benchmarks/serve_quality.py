"""Throughput over quality: answers per second of small models trained here, by implementation and by design.

    python -m benchmarks.serve_quality [--json] [--steps 300] [--rounds 2] [--runs FOLDER] [--picture PNG]

Four designs with as many multiplications per token (`DESIGNS`) learn the quickstart's text from the same seed, in the
same order: multi-head and grouped-query attention, latent attention, and a mixture of eight experts of which a token
takes two. Quality is bits per byte on what was held out. Throughput is 16 requests to each model, prompts of 64
held-out tokens and answers of 64, greedy. Contestants take turns in one process with one thread; counted are seconds of
the processor, of each contestant the fewest of all rounds.

    one by one   transformers' `generate` with its eager and its fused attention, and ours with cached keys
    batch        transformers with all prompts in one call
    engine       the serving engine with its defaults, and without compiled loops and copies of matrices

The engine also answers with weights in bf16, int8 and int4 (`quantize`), each with the quality of these weights. A
design that transformers cannot open is left out of its rows.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks.serve_peers import exported
from benchmarks.serve_quality_picture import draw
from meshwright.data.corpus.corpus import TokenStream
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.model.generate import generate
from meshwright.parallel import on_one_device
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.weights.inventory import token_flop

ATTENTION = {"layers": 4, "hidden": 192, "heads": 6, "head_dim": 32, "max_positions": 256}
DESIGNS: dict[str, dict[str, Any]] = {
    "MHA": {"preset": "llama-tiny", **ATTENTION, "kv_heads": 6, "ffn": 512},
    "GQA": {"preset": "llama-tiny", **ATTENTION, "kv_heads": 2, "ffn": 592},
    "MLA": {
        "preset": "llama-tiny", "family": "deepseek_v3", **ATTENTION, "kv_heads": 6, "ffn": 544,
        "mla": {"q_rank": 0, "kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "v_dim": 32},
    },
    "MoE": {"preset": "moe-tiny", **ATTENTION, "kv_heads": 2, "moe": {"experts": 8, "top_k": 2, "ffn": 304}},
}  # fmt: skip
"""Widths of feed-forward layers make up for what attention saves."""
RECIPE = {
    "sequence": 256, "global_batch": 8, "learning_rate": 4e-3, "learning_rate_schedule": "wsd",
    "min_learning_rate_ratio": 0.05, "eval_every": 0, "eval_sequences": 0, "checkpoint_every": 0, "log_every": 10**6,
}  # fmt: skip
TEXT = "stdlib"
"""What quickstart trains on."""
SCHEMES = ("int8", "int4-rtn")
REQUESTS, PROMPT, ANSWER = 16, 64, 64
SCORED = 200
"""Windows of held-out text that quality is measured on."""
Way = Callable[[list[list[int]]], list[list[int]]]
"""Answers to prompts."""


def trained(name: str, folder: Path, steps: int) -> Path:
    """A run of a design; one that is there is taken."""
    run = folder / name
    if not (run / "plan.yaml").is_file():
        recipe = {**RECIPE, "steps": steps, "warmup_steps": max(2, steps // 10)}
        mw.train(model=DESIGNS[name], data=TEXT, run=str(run), watchers=(), dry_run=False, recipe=recipe)
    return run


def quality(opened: TrainedModel, rows: TrainedModel) -> float:
    """Bits per byte on the text that the run of `rows` held out."""
    text = rows.held_out_rows(None, SCORED)
    bits = text.evaluate(on_one_device(opened.model), torch.device("cpu")).bits_per_byte
    assert bits is not None
    return bits


def by_engine(opened: TrainedModel, **options: Any) -> Way:
    """The engine; nothing is in its cache that was asked before."""
    serving = opened.engine(mw.EngineOptions(cache_bytes=2**27, **options))

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        wanted = mw.RequestOptions(max_new_tokens=ANSWER, ignore_end=True, salt=None)
        asked = [serving.add(prompt, wanted) for prompt in prompts]
        serving.run(asked)
        return [request.answers[0].ids for request in asked]

    return answer


def alone(opened: TrainedModel) -> Way:
    """Our model's own loop, one prompt after another."""
    return lambda prompts: [generate(opened.model, prompt, max_new_tokens=ANSWER).ids for prompt in prompts]


def by_transformers(opened: TrainedModel, attention: str, batch: int) -> Way:
    """The same weights in transformers. MeshwrightError, ValueError: it does not know the design."""
    import transformers

    with exported(opened.model) as folder:
        transformers.utils.logging.disable_progress_bar()
        peer: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
        peer = peer.eval()

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        answers = []
        for begin in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[begin : begin + batch])
            rows = peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, min_new_tokens=ANSWER,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            answers += [row[PROMPT:].tolist() for row in rows]
        return answers

    return answer


def prompts_of(opened: TrainedModel) -> list[list[int]]:
    """Held-out text, some way apart."""
    stream = opened.held_out_rows(None, 0).stream
    assert isinstance(stream, TokenStream), "the text is one source"
    apart = max(PROMPT, stream.num_tokens // (REQUESTS + 1))
    return [[int(token) for token in stream.read(row * apart, row * apart + PROMPT)] for row in range(REQUESTS)]


def race(ways: dict[str, Way], prompts: list[list[int]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Tokens per second of each contestant, in turns, and its answers."""
    seconds, answers = dict.fromkeys(ways, float("inf")), dict[str, Any]()
    for way in ways.values():
        way(prompts[:1])
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            answers[name] = way(prompts)
            seconds[name] = min(seconds[name], time.process_time() - began)
    return {name: REQUESTS * ANSWER / took for name, took in seconds.items()}, answers


def measure(folder: Path, steps: int, rounds: int, designs: Sequence[str] = tuple(DESIGNS)) -> dict[str, Any]:
    """All rows: {group, design, what, bits_per_byte, tokens_per_second}; the share of tokens that the engine and
    transformers give alike; and FLOP per token of each design."""
    runs = {name: trained(name, folder, steps) for name in designs}
    opened = {name: mw.load(run) for name, run in runs.items()}
    prompts = prompts_of(opened[designs[0]])
    ways, scores = dict[str, Way](), dict[str, float]()
    rows: dict[str, tuple[str, str, str]] = {}

    def enter(group: str, design: str, what: str, way: Callable[[], Way], score: float) -> None:
        key = f"{group}/{design}/{what}"
        try:
            ways[key] = way()
        except (MeshwrightError, ValueError, ImportError) as error:
            left_out[f"{design}, {what}"] = " ".join(str(error).split())
            return
        rows[key], scores[key] = (group, design, what), score

    left_out: dict[str, str] = {}
    for name, model in opened.items():
        score = quality(model, model)
        enter("design", name, "transformers", partial(by_transformers, model, "sdpa", 1), score)
        enter("design", name, "engine", partial(by_engine, model), score)
    base = "GQA" if "GQA" in designs else designs[0]
    base_run, fp32 = opened[base], scores[f"design/{base}/engine"]
    enter("implementation", base, "eager attention", partial(by_transformers, base_run, "eager", 1), fp32)
    enter("implementation", base, "fused attention", partial(by_transformers, base_run, "sdpa", 1), fp32)
    enter("implementation", base, "our own loop", partial(alone, base_run), fp32)
    enter("implementation", base, "fused, one batch", partial(by_transformers, base_run, "sdpa", REQUESTS), fp32)
    plain = partial(by_engine, base_run, packed=False, compiled=False)
    enter("implementation", base, "paged, plain torch", plain, fp32)
    enter("implementation", base, "paged", partial(by_engine, base_run), fp32)
    half = mw.load(runs[base], "bf16")
    enter("implementation", base, "paged, bf16", partial(by_engine, half), quality(half, base_run))
    for scheme in SCHEMES:
        out = folder / f"{base}-{scheme}"
        if not out.exists():
            mw.quantize(runs[base], scheme, out, quality=False)
        coded = mw.load(out)
        what = f"paged, {scheme.partition('-')[0]}"
        enter("implementation", base, what, partial(by_engine, coded), quality(coded, base_run))
    speeds, answers = race(ways, prompts, rounds)
    return {
        "steps": steps,
        "rows": [
            {"group": group, "design": design, "what": what, "bits_per_byte": scores[key],
             "tokens_per_second": speeds[key]}
            for key, (group, design, what) in rows.items()
        ],
        "equal_tokens": {
            name: _equal(answers[f"design/{name}/engine"], answers[f"design/{name}/transformers"])
            for name in designs if f"design/{name}/transformers" in answers
        },
        "flop_per_token": {
            name: token_flop(model.model.shape, PROMPT + ANSWER, causal=True).forward for name, model in opened.items()
        },
        "left_out": left_out,
    }  # fmt: skip


def _equal(answers: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Share of tokens that are alike, up to the first that is not in each answer."""
    alike = 0
    for answer, other in zip(answers, others, strict=True):
        differs = next(
            (index for index, pair in enumerate(zip(answer, other, strict=True)) if pair[0] != pair[1]), ANSWER
        )
        alike += differs
    return alike / (len(answers) * ANSWER)


def main(words: Sequence[str] | None = None) -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--designs", default=",".join(DESIGNS), help="some of them, with commas")
    parser.add_argument("--runs", type=Path, help="where runs are kept; those that are there are taken")
    parser.add_argument("--picture", type=Path, help="draw the rows")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        figures = measure(asked.runs or Path(made), asked.steps, asked.rounds, asked.designs.split(","))
    if asked.picture:
        draw(figures, asked.picture)
    if asked.json:
        print(json.dumps(figures))
        return
    print(f"{'':16}{'design':8}{'':28}{'bits/byte':>10}{'tokens/s':>10}")
    for row in figures["rows"]:
        numbers = f"{row['bits_per_byte']:>10.4f}{row['tokens_per_second']:>10,.0f}"
        print(f"{row['group']:16}{row['design']:8}{row['what']:28}{numbers}")
    print(
        "MFLOP per token: " + ", ".join(f"{name} {flop / 1e6:.2f}" for name, flop in figures["flop_per_token"].items())
    )
    for name, share in figures["equal_tokens"].items():
        print(f"{name}: {share:.1%} of tokens before the first that differs from transformers'")
    for name, why in figures["left_out"].items():
        print(f"left out: {name}: {why}")


if __name__ == "__main__":
    main()
