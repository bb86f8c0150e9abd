"""Adapters by request: what they cost beside the base alone, and beside a model for each of them.

    python -m benchmarks.serve_adapters [--json] [--rounds 3]

16 requests to `llama-10m` in fp32, of 32 tokens each, which grow by 64. They have no adapter, or one, 4 or 16 different
ones of rank 16 on every matrix. Beside 4 adapters stand 4 models with one of them merged in, of which each answers its
4 requests; they take turns. Answers with adapters are compared with those of the merged models, token by token.
Seconds are those of the processor with one thread, of each contestant the fewest of all rounds.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from meshwright.model import Transformer, build
from meshwright.model.low_rank import merge_adapter
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec import presets
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.inventory import adapter_parts, parameters

SHAPE = presets.model("llama-10m")
LORA = LoRAShape(rank=16)
REQUESTS, PROMPT, NEW = 16, 32, 64
MANY = (1, 4, 16)


def adapter(shape: ModelShape, seed: int) -> ServedAdapter:
    """One of chance, on every matrix."""
    chance = torch.Generator().manual_seed(seed)
    low = [parameter for parameter in parameters(replace(shape, lora=LORA)) if parameter.adapts]
    return ServedAdapter(
        LORA, {parameter.name: torch.randn(parameter.shape, generator=chance) * 0.02 for parameter in low}
    )


def whole(shape: ModelShape, adapter: ServedAdapter) -> Transformer:
    """The model with it merged in."""
    merged_model = build(shape).eval()
    with torch.no_grad():
        for name, parameter in merged_model.named_parameters():
            low = adapter_parts(name, adapter.tensors)
            if low:
                parameter.copy_(merge_adapter(parameter, low, LORA))
    return merged_model


def measured(rounds: int) -> dict[str, float]:
    """Processor seconds of each contestant, and what follows."""
    chance = random.Random(0)
    prompts = [[chance.randrange(SHAPE.vocab) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    model = build(SHAPE).eval()
    adapters = {str(number): adapter(SHAPE, number) for number in range(max(MANY))}
    options = EngineOptions(cache_bytes=2**28, most_sequences=REQUESTS)
    engine = ServingEngine(model, options, adapters=adapters)
    apart = [ServingEngine(whole(SHAPE, adapters[str(number)]), options) for number in range(4)]

    def mixed(many: int) -> list[list[int]]:
        wanted = [_wanted(str(number % many) if many else None) for number in range(REQUESTS)]
        asked = [engine.add(prompt, request) for prompt, request in zip(prompts, wanted, strict=True)]
        engine.run(asked)
        return [request.answers[0].ids for request in asked]

    def models() -> list[list[int]]:
        answers_by_place: dict[int, list[int]] = {}
        for number, engine in enumerate(apart):
            places = range(number, REQUESTS, len(apart))
            asked = [engine.add(prompts[number], _wanted(None)) for number in places]
            engine.run(asked)
            answers_by_place.update(
                {number: request.answers[0].ids for number, request in zip(places, asked, strict=True)}
            )
        return [answers_by_place[number] for number in range(REQUESTS)]

    contestants: dict[str, Callable[[], list[list[int]]]] = {
        "base": lambda: mixed(0), **{str(many): partial(mixed, many) for many in MANY}, "models": models,
    }  # fmt: skip
    seconds = dict.fromkeys(contestants, float("inf"))
    answers: dict[str, list[list[int]]] = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.process_time()
            answers[name] = run()
            seconds[name] = min(seconds[name], time.process_time() - began)
    made = REQUESTS * NEW
    return {
        **{f"{name}_tokens_per_s": made / taken for name, taken in seconds.items()},
        **{f"base_over_{many}": seconds[str(many)] / seconds["base"] for many in MANY},
        "adapters_over_models": seconds["models"] / seconds["4"],
        "differing": sum(request != other for request, other in zip(answers["4"], answers["models"], strict=True)),
    }


def _wanted(called: str | None) -> RequestOptions:
    return RequestOptions(max_new_tokens=NEW, adapter=called, salt=None)


def main(words: Sequence[str] | None = None) -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measured(asked.rounds)
    print(
        json.dumps(figures) if asked.json else "\n".join(f"{name:24} {value:,.4g}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
