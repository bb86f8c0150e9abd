"""Properties of serving frameworks that are not arithmetic: their schedulers' rules, and time beside the kernels."""

from typing import NamedTuple

from meshwright.planner.kernels.chips import silicon_of
from meshwright.spec.layout.cluster import Device
from meshwright.spec.plan.execution import CPU_TOKENS, GPU_SEQUENCES, MEMORY_SHARE, step_tokens


class Framework(NamedTuple):
    """One serving framework. Times are in microseconds."""

    name: str
    layer_us: float
    """Time of the small kernels of a layer: norms, rotation, cache writes, activations, routing."""
    step_us: float
    """Time of a step on the host that no kernel hides, and of sampling."""
    sequence_us: float
    """Time of each sequence that decodes, on the host."""
    prefill_us: float
    """Time of a prompt before and after its kernels: HTTP, tokenizer, the first answer."""
    launched_us: float
    """Time to launch the kernels of a layer with prompts, one by one. Latent attention: LATENT times that."""
    share: float
    """Share of the speed that kernels have alone."""
    mixes: bool
    """True if chunks of prompts run in one step with decoding. Otherwise decoding waits for a step of prompts."""
    budget: int
    """Tokens of a step."""
    turn_us: float = 5000.0
    """Time from the end of an answer to the client's next request at the scheduler."""
    ahead: bool = True
    """True if a step is planned while the one before runs. Requests that come meanwhile wait for the next one."""
    receive_every: int = 1
    """Steps of decoding after which new requests are looked for. A step with prompts looks at once."""
    fuses: bool = True
    """True if products that read the same input are one: queries, keys and values; gate and up."""
    reserve: float = 0.9
    """Share of a device's memory that it takes."""
    beside: int = 0
    """Tokens of prompts in a step in which answers grow. 0 = all of the budget."""
    prompt_layer_us: float = 0.0
    """Time of a layer with prompts, beside `layer_us` and its kernels."""
    cache_share: float = 1.0
    """Share of the memory it takes, beyond all other needs, that keys and values get."""
    sequences: int = 0
    """Most answers at once. 0 = as many as fit."""


LATENT = 4.0
VLLM = Framework("vllm", 6.0, 600.0, 3.0, 4.5e4, 200.0, 0.9, mixes=True, budget=8192)
SGLANG = Framework("sglang", 6.0, 400.0, 3.0, 3.5e4, 400.0, 0.9, mixes=False, budget=16384, reserve=0.85)
TENSORRT = Framework("trtllm", 6.0, 300.0, 3.0, 3.5e4, 400.0, 0.95, mixes=True, budget=8192)
FRAMEWORKS = {framework.name: framework for framework in (VLLM, SGLANG, TENSORRT)}
"""Frameworks on GPUs, in the benchmarks that docs/accuracy.md scores. The constants are explained there."""
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
"""Meshwright's own engine, without a server. A calibrated machine adds the time of a layer beside its kernels."""


def meshwright_on(device: Device, hidden: int) -> Framework:
    """Return Meshwright's engine with the defaults that it has on a device, for a model of this width."""
    if not device.is_gpu:
        return MESHWRIGHT
    tokens = step_tokens(silicon_of(device).processors, hidden)
    return MESHWRIGHT._replace(
        budget=tokens, cache_share=MEMORY_SHARE, sequences=GPU_SEQUENCES, fuses=True, layer_us=SMALL_KERNELS * LAUNCH_US
    )  # fmt: skip


SMALL_KERNELS, LAUNCH_US = 5, 2.0
"""Small kernels of a layer on a GPU, and microseconds of each.
They are two norms, rotation with the write into the cache, the sum of attention's runs, the activation (`python -m
benchmarks.decode_step` counts them). The time is an estimate for a kernel in a graph that moves few bytes: none was
timed alone. With it the step before, of 15 such kernels a layer, is planned at 5.31 ms, and one H200 took 6.18 (8B, one
row, 2026-11-27).
"""
