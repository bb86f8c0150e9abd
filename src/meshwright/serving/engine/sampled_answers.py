"""Answers of a model during its training: many prompts at once, each with its own seed."""

from collections.abc import Sequence

import torch

from meshwright.model.transformer import Transformer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.memory.buffers import BLOCK, MOST_BYTES


def sampled_answers(
    model: Transformer, prompts: Sequence[Sequence[int]], *, longest: int, most: Sequence[int], seeds: Sequence[int],
    temperature: float, stop_ids: Sequence[int], at_once: int,
) -> list[list[int]]:  # fmt: skip
    """Return at most `most` new tokens of each prompt, including one that ends it.

    The same call gives the same answers. The model is left in evaluation mode. Raises RunError for logits that are not
    finite.

    Args:
        longest: Tokens of prompt and answer.
        at_once: Answers that are generated together.
    """
    options = EngineOptions(
        cache_bytes=MOST_BYTES, copies_bytes=0, block=BLOCK, most_sequences=at_once,
        most_tokens=max(512, at_once + 1), longest=longest, warm_start=False,
    )  # fmt: skip
    with torch.no_grad():
        engine = ServingEngine(model, options, end_ids=stop_ids)
        requests = [
            engine.add(prompt, RequestOptions(max_new_tokens=number, temperature=temperature, seed=seed, salt=None))
            for prompt, number, seed in zip(prompts, most, seeds, strict=True)
        ]
        engine.run(requests)
    return [list(request.answers[0].ids) for request in requests]
