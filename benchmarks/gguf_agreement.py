"""Our GGUF files in llama.cpp, and beside those of its own quantizer.

    python -m benchmarks.gguf_agreement [--json] [--steps 200]

Needs llama-cpp-python, which builds llama.cpp. Random models of every family are written in fp32 and opened there: the
largest difference of logits. Weights are encoded by both: bytes that differ of types that have the reference's codes,
and the error of the K types over that of ggml. A model is trained here on the standard library's source, in bytes, and
quantized by both: KL(before || after) on held-out text, of ours and of theirs, both read by this package.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.compress.gguf_stream import plan_gguf, write_gguf
from meshwright.compress.original import open_original
from meshwright.compress.quality import compare
from meshwright.interface.trained.opening import described
from meshwright.kernels.quantized.gguf_blocks import decode, encode
from meshwright.spec.weights.gguf_schemes import GGUF_SCHEMES
from meshwright.verbs.quantize.passes import quantization_text
from tests.compress.test_gguf import SHAPES, model_of, written
from tests.compress.test_llama_cpp import logits, opened, their_codes, their_file, tokens

LEARNER = {
    "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 257, "max_positions": 128, "tied": True,
}  # fmt: skip
RECIPE = {
    "sequence": 128, "global_batch": 8, "learning_rate": 2e-3, "warmup_steps": 10, "eval_every": 0,
    "eval_sequences": 0, "checkpoint_every": 0, "log_every": 10**6,
}  # fmt: skip
EQUAL, SEARCHED = ("Q8_0", "Q4_0", "Q5_0", "Q5_1"), ("Q4_K", "Q5_K", "Q6_K")
COMPARED = ("q4_k_m", "q4_k_s", "q5_k_m", "q6_k", "q4_0", "q8_0")
WINDOWS = 128
TABLED = "gpt2"
"""llama.cpp takes its GELU from a table of fp16 numbers."""


@torch.no_grad()
def logit_errors(folder: Path) -> dict[str, float]:
    """Largest difference over the largest logit, of each family."""
    errors, ids = {}, tokens(60)
    for name, shape in SHAPES.items():
        path = written(folder / f"{name}.gguf", model_of(shape))
        with opened(path) as model:
            theirs = logits(model, ids)
        ours = mw.load(path).model(torch.tensor([ids]))[0]
        errors[name] = float((ours - theirs).abs().max() / theirs.abs().max())
    return errors


def codes() -> tuple[int, dict[str, float]]:
    """Bytes that differ from ggml's, and errors over those of ggml, on normal weights."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    differing = sum(int((encode(kind, weight) != their_codes(kind, weight)).sum()) for kind in EQUAL)

    def error(kind: str, raw: torch.Tensor) -> float:
        return float((decode(kind, raw) - weight).norm())

    ratios = {
        kind: error(kind, encode(kind, weight)) / error(kind, their_codes(kind, weight)) for kind in SEARCHED
    }  # fmt: skip
    return differing, ratios


def losses(folder: Path, steps: int, limit_bytes: int) -> dict[str, dict[str, float]]:
    """KL of both, scheme by scheme, of a model that is trained here."""
    data = {"path": "stdlib", "tokenizer": "bytes", "limit_bytes": limit_bytes, "validation": 0.01}
    mw.train(
        model=LEARNER, data=data, run=str(folder / "run"), watchers=(), dry_run=False, recipe={**RECIPE, "steps": steps}
    )
    original = open_original(folder / "run", "last")
    plain = folder / "plain.gguf"
    write_gguf(plain, original, plan_gguf(original, torch.float32))
    before = mw.load(folder / "run")
    batches = quantization_text(described(folder / "run"), None, WINDOWS, None).scored
    figures = {}
    for name in COMPARED:
        ours = folder / f"ours-{name}.gguf"
        write_gguf(ours, original, plan_gguf(original, torch.float32, GGUF_SCHEMES[name]))
        files = ours, their_file(plain, GGUF_SCHEMES[name], folder / f"theirs-{name}.gguf")
        kl = [compare(before.model, mw.load(file).model, batches).kl for file in files]
        figures[name] = {"ours": kl[0], "theirs": kl[1], "bytes": files[0].stat().st_size}
    return figures


def measure(steps: int, limit_bytes: int = 4_000_000) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        errors, (differing, ratios) = logit_errors(Path(folder)), codes()
        kl = losses(Path(folder), steps, limit_bytes)
    return {
        "logit_error": max(error for name, error in errors.items() if name != TABLED),
        "table_logit_error": errors[TABLED],
        "differing_bytes": differing,
        "k_error": max(ratios.values()),
        "k_errors": ratios,
        "kl": kl,
        "q4_k_m_kl": kl["q4_k_m"]["ours"] / kl["q4_k_m"]["theirs"],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit-bytes", type=int, default=4_000_000)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measure(options.steps, options.limit_bytes)
    if options.json:
        print(json.dumps(figures))
        return 0
    print(f"logits: {figures['logit_error']:.1e} of the largest; GPT-2 {figures['table_logit_error']:.1e}")
    print(f"codes: {figures['differing_bytes']} bytes differ; error over ggml's: {figures['k_errors']}")
    for name, divergence in figures["kl"].items():
        print(
            f"{name:8s} KL {divergence['ours']:.3e}, llama-quantize {divergence['theirs']:.3e}, "
            f"{divergence['bytes']:,} bytes"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
