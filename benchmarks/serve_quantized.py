"""Decoding with weights of 8 and 4 bits: the serving engine beside transformers in fp32 and llama.cpp.

    python -m benchmarks.serve_quantized [--json] [--rounds 3] [--new 24]

A random model of the shape of SmolLM2-135M (30 layers of 576, 9 heads over 3, feed-forward 1536, vocabulary 49,152).
1, 4 and 16 sequences of 32 tokens each get `--new` tokens, greedy. Contestants take turns in one process with one
thread; counted are seconds of the processor from the second new token on, of each contestant the fewest of all rounds.

    hf       transformers, fp32, `generate`
    engine   the engine, fp32
    bf16     the engine, fp32, with weights that were stored in bf16
    int8     the engine with weights in int8, made by `quantize`'s scheme int8, and its head's product in int8
    int4     the same with `int4-rtn`: groups of 32, a scale and a zero each
    llama    llama.cpp, Q8_0, a batch of one token a sequence; only where llama-cpp-python is installed
    llama4   the same, Q4_0: groups of 32, a scale each

`top1` is the share of the int8 engine's tokens that the fp32 engine gives, too; random weights have no other quality.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_speed import peer_of
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer, build
from meshwright.model.quantized_weights import QuantizedWeight, quantizable, quantized_name
from meshwright.model.transformer import build_quantized
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import ModelShape
from tests.compress.test_gguf import model_of, written

SHAPE = ModelShape(
    name="smollm2-135m", vocab=49152, layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536,
    max_positions=2048, tied=True,
)  # fmt: skip
BATCHES, PROMPT = (1, 4, 16), 32
PAIRS = (("int8", "hf"), ("int8", "llama"), ("int4", "llama4"), ("bf16", "engine"))
Decoding = Callable[[list[list[int]], int], float]
"""Prompts, and how many new tokens behind the first each gets -> seconds of the processor for these."""


def hf(model: Transformer) -> Decoding:
    """transformers: the time of all tokens less that of one."""
    peer = peer_of(model)

    def decode(prompts: list[list[int]], new: int) -> float:
        ids = torch.tensor(prompts)
        seconds = []
        for count in (1, new + 1):
            began = time.process_time()
            peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            seconds.append(time.process_time() - began)
        return seconds[1] - seconds[0]

    return decode


def engine(model: Transformer, answers: dict[int, list[list[int]]], **options: Any) -> Decoding:
    """The engine; `answers` keeps the tokens of each batch."""
    serving = ServingEngine(model, EngineOptions(cache_bytes=2**28, **options))

    def decode(prompts: list[list[int]], new: int) -> float:
        asked = [serving.add(prompt, RequestOptions(max_new_tokens=new + 1, salt=None)) for prompt in prompts]
        while not all(request.answers[0].ids for request in asked):
            serving.step()
        began = time.process_time()
        serving.run(asked)
        seconds = time.process_time() - began
        answers[len(prompts)] = [request.answers[0].ids for request in asked]
        return seconds

    return decode


def llama(folder: Path, kind: str = "q8_0") -> Decoding:
    """llama.cpp, by its own C interface."""
    library = import_module("llama_cpp")
    path = written(folder / f"{kind}.gguf", model_of(SHAPE), kind)
    settings = library.llama_model_default_params()
    loaded = library.llama_model_load_from_file(str(path).encode(), settings)
    room = library.llama_context_default_params()
    room.n_ctx, room.n_batch, room.n_ubatch, room.n_seq_max = 16 * 128, 512, 512, 16
    room.n_threads = room.n_threads_batch = 1
    context = library.llama_init_from_model(loaded, room)

    def fed(tokens: Sequence[tuple[int, int, int]]) -> list[int]:
        """(sequence, position, token) each -> the likeliest next token of each."""
        batch = library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for row, (sequence, position, token) in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, True
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        assert library.llama_decode(context, batch) == 0
        rows = [library.llama_get_logits_ith(context, row) for row in range(len(tokens))]
        chosen = [int(torch.frombuffer(row_of(row), dtype=torch.float32).argmax()) for row in rows]
        library.llama_batch_free(batch)
        return chosen

    def row_of(row: Any) -> Any:
        ctypes = import_module("ctypes")
        return (ctypes.c_float * SHAPE.vocab).from_address(ctypes.addressof(row.contents))

    def decode(prompts: list[list[int]], new: int) -> float:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        last = []
        for number, prompt in enumerate(prompts):
            last.append(fed([(number, position, token) for position, token in enumerate(prompt)])[-1])
        began = time.process_time()
        for step in range(new):
            last = fed([(number, PROMPT + step, token) for number, token in enumerate(last)])
        return time.process_time() - began

    return decode


@torch.no_grad()
def quantized(model: Transformer, scheme: str) -> Transformer:
    """The same weights by a scheme that needs no text; what it leaves out is shared with the model."""
    sizes = quantizable(model.shape)
    model_of_codes = build_quantized(
        model.shape, dict.fromkeys(sizes, SCHEMES[scheme]), outlier_columns={}, dtype=torch.float32
    )
    parameters_by_name = dict(model_of_codes.named_parameters())
    for name, weight in model.named_parameters():
        if name in sizes:
            module = model_of_codes.get_submodule(quantized_name(name))
            assert isinstance(module, QuantizedWeight)
            module.take(quantize_matrix(name, weight, SCHEMES[scheme]))
        else:
            parameters_by_name[name].copy_(weight)
    return model_of_codes.eval()


def model_in_bf16() -> Transformer:
    """Its numbers are those of bf16."""
    return build(SHAPE).bfloat16().float().eval()


def race(rounds: int, new: int) -> dict[str, float]:
    """All contestants in turns."""
    model = build(SHAPE).eval()
    ways: dict[str, Decoding] = {"hf": hf(model)}
    answers: dict[str, dict[int, list[list[int]]]] = {"engine": {}, "int8": {}}
    ways["engine"] = engine(model, answers["engine"])
    ways["bf16"] = engine(model_in_bf16(), {})
    ways["int8"] = engine(quantized(model, "int8"), answers["int8"], head="int8")
    ways["int4"] = engine(quantized(model, "int4-rtn"), {}, head="int8")
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        if find_spec("llama_cpp"):
            ways["llama"] = llama(Path(folder))
            ways["llama4"] = llama(Path(folder), "q4_0")
        best = {(name, batch): float("inf") for name in ways for batch in BATCHES}
        for _ in range(rounds):
            for batch in BATCHES:
                prompts = [[chance.randrange(SHAPE.vocab) for _ in range(PROMPT)] for _ in range(batch)]
                for name, way in ways.items():
                    best[name, batch] = min(best[name, batch], way(prompts, new))
    figures = {f"{name}_{batch}_tokens_per_second": batch * new / seconds for (name, batch), seconds in best.items()}
    for batch in BATCHES:
        for ours, peer in PAIRS:
            if peer in ways:
                figures[f"{ours}_over_{peer}_{batch}"] = best[peer, batch] / best[ours, batch]
    pairs = [
        (token, other)
        for batch in BATCHES
        for pair in zip(answers["engine"][batch], answers["int8"][batch], strict=True)
        for token, other in zip(*pair, strict=True)
    ]
    return figures | {"top1": sum(token == other for token, other in pairs) / len(pairs)}


def main(words: Sequence[str] | None = None) -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=24)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = race(asked.rounds, asked.new)
    print(
        json.dumps(figures) if asked.json else "\n".join(f"{name:34} {value:,.4g}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
