"""What serving frameworks do that is not arithmetic: their schedulers' rules, and time beside the kernels."""

from typing import NamedTuple

from meshwright.planner.kernels.chips import silicon_of
from meshwright.spec.cluster import Device
from meshwright.spec.serving_defaults import CPU_TOKENS, GPU_SEQUENCES, MEMORY_SHARE, step_tokens


class Framework(NamedTuple):
    """One serving framework. Times in microseconds."""

    name: str
    layer_us: float
    """Of the small kernels of a layer: norms, rotation, cache writes, activations, routing."""
    step_us: float
    """Of a step on the host that no kernel hides, and of sampling."""
    sequence_us: float
    """The same for each sequence that decodes."""
    prefill_us: float
    """Of a prompt before and after its kernels: HTTP, tokenizer, the first answer."""
    launched_us: float
    """Of a layer with prompts, whose kernels the host launches one by one; latent attention takes LATENT times that."""
    share: float
    """Of the speed that kernels have alone."""
    mixes: bool
    """Prompts are cut into chunks that run in one step with decoding; else a step of prompts lets decoding wait."""
    budget: int
    """Tokens of a step."""
    turn_us: float = 5000.0
    """From the end of an answer to the client's next request at the scheduler."""
    ahead: bool = True
    """A step is planned while the one before runs: a request that comes meanwhile waits for the next one."""
    receive_every: int = 1
    """Steps of decoding after which new requests are looked for; a step with prompts looks at once."""
    fuses: bool = True
    """Products that read the same input are one: queries, keys and values; gate and up."""
    reserve: float = 0.9
    """Share of a device's memory that it takes."""
    beside: int = 0
    """Tokens of prompts in a step in which answers grow; 0 = all of the budget."""
    prompt_layer_us: float = 0.0
    """Of a layer with prompts, beside `layer_us` and its kernels."""
    cache_share: float = 1.0
    """Of the memory that it takes and nothing else needs, what keys and values have."""
    sequences: int = 0
    """Answers that it makes at once; 0 = as many as fit."""


LATENT = 4.0
VLLM = Framework("vllm", 6.0, 600.0, 3.0, 4.5e4, 200.0, 0.9, mixes=True, budget=8192)
SGLANG = Framework("sglang", 6.0, 400.0, 3.0, 3.5e4, 400.0, 0.9, mixes=False, budget=16384, reserve=0.85)
TENSORRT = Framework("trtllm", 6.0, 300.0, 3.0, 3.5e4, 400.0, 0.95, mixes=True, budget=8192)
FRAMEWORKS = {one.name: one for one in (VLLM, SGLANG, TENSORRT)}
"""Of GPUs, and of the benchmarks that docs/accuracy.md scores; constants as its page says."""
MESHWRIGHT = Framework(
    "meshwright",
    0.0,
    500.0,
    20.0,
    0.0,
    0.0,
    1.0,
    mixes=True,
    budget=CPU_TOKENS,
    turn_us=0.0,
    ahead=False,
    fuses=False,
    reserve=1.0,
)
"""Meshwright's own engine, without a server around it. A calibrated machine says what a layer takes beside its
kernels."""


def meshwright_on(device: Device, hidden: int) -> Framework:
    """Return Meshwright's engine with the defaults that it has on a device, for a model of this width."""
    if not device.is_gpu:
        return MESHWRIGHT
    tokens = step_tokens(silicon_of(device).processors, hidden)
    return MESHWRIGHT._replace(
        budget=tokens, cache_share=MEMORY_SHARE, sequences=GPU_SEQUENCES, fuses=True, layer_us=SMALL_KERNELS * LAUNCH_US
    )  # fmt: skip


SMALL_KERNELS, LAUNCH_US = 5, 2.0
"""Of a layer on a GPU beside its products and its attention: two norms, rotation with the write into the cache, the sum
of attention's runs, the activation (`python -m benchmarks.decode_step` counts them); and what each takes in a graph
where it moves few bytes: an estimate, since no small kernel of a graph was timed alone. With it the step before, of 15
such kernels a layer, is planned at 5.31 ms, and one H200 took 6.18 (8B, one row, 2026-11-27)."""
