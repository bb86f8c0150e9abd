"""Other people's ways to answer many requests at once, for benchmarks.serve_speed."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch

from meshwright.formats.hub import export_folder
from meshwright.model import Transformer

Load = Sequence[tuple[list[int], int]]
"""Prompts, and how many tokens are asked for."""
BLOCK, STEP = 32, 512
"""Positions of a block of transformers' cache, and tokens of a step: as many as of our engine's."""
PEERS = {
    "transformers": "one by one, batches, continuous batching", "vllm": "its own engine",
    "llama_cpp": "decoding with Q8_0 (serve_quantized)", "llguidance": "answers of a form",
}  # fmt: skip
"""Module, and what it takes part with."""


def installed() -> dict[str, str]:
    """What there is, by module: its version; empty = it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    def version_of(name: str) -> str:
        try:
            return version({"llama_cpp": "llama-cpp-python"}.get(name, name))
        except PackageNotFoundError:
            return "of unknown version"

    return {name: version_of(name) if find_spec(name) else "" for name in PEERS}


@contextmanager
def exported(model: Transformer) -> Iterator[str]:
    """A Hugging Face folder of a model, without a tokenizer."""
    from pathlib import Path

    with TemporaryDirectory() as folder:
        tensors = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
        export_folder(Path(folder), model_tensors=tensors, shape=model.shape, tokenizer=None, dtype=torch.float32)
        yield folder


def continuous(peer: Any, load: Load) -> list[list[int]]:
    """transformers' continuous batching over paged blocks, all requests at once; nothing is shared between them."""
    import transformers

    blocks = sum(-(-(len(prompt) + count) // BLOCK) + 1 for prompt, count in load)
    config = transformers.ContinuousBatchingConfig(
        page_size=BLOCK, num_blocks=blocks, max_batch_tokens=STEP, allow_block_sharing=False
    )
    wanted = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max(count for _, count in load), eos_token_id=-1, pad_token_id=0
    )
    ids_by_request: dict[str, list[int]] = {}
    with peer.continuous_batching_context_manager(
        generation_config=wanted, continuous_batching_config=config
    ) as manager:  # fmt: skip
        names = [manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1) for prompt, count in load]
        while len(ids_by_request) < len(load):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                ids_by_request[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before its requests")
    return [ids_by_request[name] for name in names]


def vllm_engine(model: Transformer, dtype: str = "float32") -> Callable[[Load], list[list[int]]]:
    """vLLM in this process, without a cache of prefixes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its seconds are another process's
    from importlib import import_module

    vllm = import_module("vllm")
    with exported(model) as folder:
        engine = vllm.LLM(
            folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=model.shape.max_positions,
            enable_prefix_caching=False,
        )  # fmt: skip

    def answer(load: Load) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt, _ in load]
        ways = [
            vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in load
        ]
        return [list(request.outputs[0].token_ids) for request in engine.generate(asked, ways)]

    return answer
