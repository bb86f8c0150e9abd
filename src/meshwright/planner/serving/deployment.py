"""A deployment: a model in some format on the GPUs of one engine, with the rules of its serving framework.

A format gives the bytes of an element with its scales, and the precision of a product. A framework gives what is not
arithmetic: the rules of its scheduler, and time in addition to the kernels.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.planner.kernels.fitted_kernel import silicon_of
from meshwright.planner.serving.cached_layers import ServedModel
from meshwright.spec.errors import IllegalLayout, PlanError, argument
from meshwright.spec.layout.cluster import Device
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.model.shape import LoRAShape
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
    mixed_prompt_tokens: int = 0
    """Most tokens of prompts in a step that also decodes. 0 = all of the budget."""
    prompt_layer_us: float = 0.0
    """Time of a layer with prompts, in addition to `layer_us` and its kernels."""
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
"""Meshwright's own engine, without a server. A calibrated machine adds the time of a layer on top of its kernels."""


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


class NumberFormat(NamedTuple):
    """Format of one kind of matrices."""

    name: str
    width: float
    """Bytes of a weight, its share of scales included."""
    computes: float
    """Bytes of the operands of the product itself: 2 = 16 bit, 1 = 8 bit, 0.5 = 4 bit."""


BF16 = NumberFormat("bf16", 2.0, 2.0)
FP8 = NumberFormat("fp8", 1.0, 1.0)
FP8_BLOCK = NumberFormat("fp8_block", 1.0 + 4 / 128**2, 1.0)
NVFP4 = NumberFormat("nvfp4", 0.5 + 1 / 16, 0.5)
INT4 = NumberFormat("int4_wo", 0.5 + 2 / 32, 2.0)
FP32 = NumberFormat("fp32", 4.0, 4.0)
FORMATS = {each.name: each for each in (FP32, BF16, FP8, FP8_BLOCK, NVFP4, INT4)}
"""Formats by name.
nvfp4: 4-bit floating point, an fp8 scale for 16 (NVIDIA). int4_wo: integers, a bf16 scale for 32, products in 16 bit.
"""


class WeightFormats(NamedTuple):
    """Formats of a served model. Embedding, head and norms stay in 16 bit."""

    attention: NumberFormat = BF16
    mlp: NumberFormat = BF16
    """Format of dense MLPs and shared experts."""
    experts: NumberFormat = BF16
    other: float = 2.0
    """Bytes of an element of embedding, head, router and norms."""


def formats_of(name: str, *, experts: bool) -> WeightFormats:
    """Return the formats that a name stands for: one of FORMATS, or a scheme of `quantize`.

    fp32 and bf16 apply to everything. As in published checkpoints, 8 bits apply to all matrices. 4 bits apply to all
    matrices of a dense model, and to the routed experts of a mixture, whose attention stays in 16 bit. Raises PlanError
    for other names.
    """
    chosen = FORMATS.get(name) or _of_scheme(name)
    if chosen.width > 2:
        return WeightFormats(chosen, chosen, chosen, chosen.width)
    if chosen.width < 0.9 and experts:
        return WeightFormats(BF16, BF16, chosen)
    return WeightFormats(chosen, chosen, chosen)


def _of_scheme(name: str) -> NumberFormat:
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise PlanError(
            f"{argument('quantization', name)} is not known: take one of "
            f"{', '.join(dict.fromkeys((*FORMATS, *SCHEMES)))}"
        )
    return NumberFormat(name, bytes_per_weight(scheme), 2.0 if scheme.activations == "same" else 1.0)


SIDE = 4096
"""Side of the matrix by which a scheme's bytes of a weight are counted: scales are a few percent at most."""


def bytes_per_weight(scheme: Scheme) -> float:
    """Return the bytes of codes, scales and zeros of a matrix, per element."""
    return scheme.nbytes((SIDE, SIDE)) / SIDE**2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDegrees:
    """Degrees of one engine: tp * attention_dp GPUs, which also share the experts as expert_tp * expert_ep."""

    tp: int = 1
    """Ranks that share heads, MLPs and vocabulary."""
    attention_dp: int = 1
    """Groups of tp ranks with their own requests. They meet in the experts."""
    expert_tp: int = 1
    """Ranks that share each expert."""
    expert_ep: int = 1
    """Parts into which the experts are dealt."""

    @property
    def gpus(self) -> int:
        """GPUs of the engine."""
        return self.tp * self.attention_dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One engine."""

    model: ServedModel
    device: Device
    degrees: EngineDegrees
    formats: WeightFormats
    framework: Framework
    cache_width: float = 2.0
    """Bytes of an element of keys and values."""
    drafted: int = 0
    """Tokens that extra layers draft in each step (multi-token prediction). 0 = none."""
    adapters: int = 0
    """Number of adapters held in addition to the model, each of shape `adapter`."""
    adapter: LoRAShape | None = None
    per_node: int = 8
    """Devices that fast links join."""
    _checked: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape, degrees = self.model.shape, self.degrees
        if shape.heads % degrees.tp:
            raise IllegalLayout(f"{argument('tp', degrees.tp)} does not divide the {shape.heads} heads of {shape.name}")
        if shape.moe and degrees.expert_tp * degrees.expert_ep != degrees.gpus:
            raise IllegalLayout(
                f"expert_tp={degrees.expert_tp} x expert_ep={degrees.expert_ep} is not the {degrees.gpus} GPUs of "
                f"{argument('tp', degrees.tp)} x attention_dp={degrees.attention_dp}"
            )
        if shape.moe and shape.moe.experts % degrees.expert_ep:
            raise IllegalLayout(f"expert_ep={degrees.expert_ep} does not divide {shape.moe.experts} experts")
