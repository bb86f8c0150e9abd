"""How a serving engine uses its machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from meshwright.serve.scheduler import check_budget
from meshwright.spec.errors import ArgumentError
from meshwright.spec.serving_defaults import (
    BESIDE_ANSWERS,
    CACHE_FORMS,
    CPU_CACHE_BYTES,
    CPU_SEQUENCES,
    CPU_TOKENS,
    GPU_SEQUENCES,
    HEADS,
    MEMORY_SHARE,
    CacheForm,
    HeadForm,
    step_tokens,
)

if TYPE_CHECKING:
    import torch

    from meshwright.serve.speculation import Speculation

Graphs = Literal["auto", "on", "off"]
"""Whether steps are CUDA graphs; auto: where they can be."""
GRAPHS: tuple[Graphs, ...] = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine uses its machine."""

    exact: bool = False
    """An answer's bits depend on its own request alone: not on others, chunks, hits of the cache, or preemption. On
    CPUs. Else they depend on these by the rounding of sums in another order."""
    cache_bytes: int = 0
    """Most bytes of keys and values; less where `most_sequences` of the model's length take less. 0 = 1 GiB on a CPU,
    and on a GPU `memory_share` of what is free there."""
    memory_share: float = MEMORY_SHARE
    """Share of a GPU's memory that keys and values take, of what is free beside weights, CUDA graphs and the largest
    step. Measured when the engine starts; not used with `cache_bytes`."""
    host_cache_bytes: int = 0
    """Most bytes of host memory for cached prefixes whose blocks were given away; 0 = they are computed again. For a
    model on a GPU. On a CPU it is memory as the cache is, and holds prefixes beyond what `most_sequences` can fill."""
    cache_dtype: CacheForm = "model"
    """What keys and values are kept as: the model's dtype, or 8 bits (`int8`, `fp8`) with a scale for each position and
    head. Twice or nearly four times as many positions then fit; answers change a little."""
    copies_bytes: int = 2**28
    """Most bytes of keys and values that answers have beside the blocks once more while they grow, in one piece each:
    attention is then sooner. 0 = none."""
    block: int = 16
    """Positions of a block of the cache."""
    most_tokens: int = 0
    """Of a step: new tokens of all sequences, and chunks of prompts. 0 = 512 on a CPU, and on a GPU as many as its
    products take to reach 90 % of their rate (spec/serving_defaults.py)."""
    prompt_tokens: int = 0
    """Most tokens of prompts in a step in which answers grow: fewer make a long prompt slower and those answers
    steadier. 0 = 128 on a CPU, and as many as a step has on a GPU."""
    most_sequences: int = 0
    """Answers that are made at once; others wait. 0 = 64 on a CPU, 256 on a GPU."""
    longest: int = 0
    """Most tokens of prompt and answer; 0 = the model's positions."""
    packed: bool = True
    """On a CPU, copies of the model's matrices in the order in which products of few rows read them: as large as the
    matrices (those that read one input are kept side by side, too), in fp32 where the CPU has no units for 16 bits."""
    compiled: bool = True
    """On a CPU with a C compiler, and in fp32: loops that are compiled in the first second take the place of several
    operations of torch each. Answers of the other way differ by rounding."""
    second_layouts: bool = False
    """On a GPU, products with 4-bit codes may use a second layout of them in memory where that is faster: torch's and
    gemlite's order, or a copy in 16 bits. All ways are timed when the engine starts, those without one in any case."""
    speculation: "Speculation | None" = None
    """Guesses of several tokens that are computed in one step; None = there are none. Answers stay what they are; those
    that keep to a schema or regex have no guesses."""
    head: HeadForm = "model"
    """`int8`: the head's matrix is rounded to 8 bits, as the hidden states are that it multiplies; each row has a scale
    of its own. A quantized model's head is not quantized."""
    cuda_graphs: Graphs = "auto"
    """On a GPU, steps without chunks of prompts are launched as one CUDA graph for each number of rows
    (step_graphs.py). `on`: refused where they cannot be. Answers differ by rounding, since rows are
    padded; rows of adapters run as they are."""
    run_ahead: bool | None = None
    """Launch a step before the tokens of the one before it are read, so that the device need not wait for the host.
    None = on a GPU. Steps wait all the same beside answers with a schema, regex, penalties or beams, with
    `speculation`, on several ranks, and where the cache is short of blocks. Answers differ by rounding at most."""
    warm_start: bool = True
    """Capture all CUDA graphs when the engine starts. Else each is captured when a step first needs it: requests then
    wait for captures, and a short use of the engine does not."""
    on_progress: Callable[[str], None] | None = None
    """Called with a line for people while the engine starts on a GPU: memory, and graphs that are captured."""

    def on_device(self, device: "torch.device", hidden: int) -> Self:
        """Replace zeros by this device's defaults, for a model with `hidden` numbers a token. The cache of a GPU stays
        0: what is free there is measured once weights are loaded."""
        cpu = device.type == "cpu"
        sequences = self.most_sequences or (CPU_SEQUENCES if cpu else GPU_SEQUENCES)
        tokens = self.most_tokens
        if not tokens and cpu:
            tokens = max(CPU_TOKENS, 2 * sequences)
        elif not tokens:
            from meshwright.compat import processors

            tokens = step_tokens(processors(device.index), hidden, sequences)
        cache_bytes = self.cache_bytes or (CPU_CACHE_BYTES if cpu else 0)
        ahead = not cpu if self.run_ahead is None else self.run_ahead
        return replace(
            self, most_sequences=sequences, most_tokens=tokens, cache_bytes=cache_bytes, run_ahead=ahead
        )  # fmt: skip

    def beside_answers(self, device: "torch.device") -> int:
        """`prompt_tokens` on a device."""
        return self.prompt_tokens or (BESIDE_ANSWERS if device.type == "cpu" else self.most_tokens)

    @property
    def most_rows(self) -> int:
        """Rows of the largest step without chunks of prompts."""
        guesses = self.speculation.tokens if self.speculation else 0
        return min(self.most_tokens, self.most_sequences * (1 + guesses))

    def __post_init__(self) -> None:
        """ArgumentError, which names the field."""
        for name, least in {
            "block": 1,
            "cache_bytes": 0,
            "host_cache_bytes": 0,
            "most_sequences": 0,
            "most_tokens": 0,
            "copies_bytes": 0,
            "longest": 0,
            "prompt_tokens": 0,
        }.items():
            if getattr(self, name) < least:
                raise ArgumentError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 < self.memory_share <= 1:
            raise ArgumentError(f"memory_share={self.memory_share} must be above 0 and at most 1")
        if self.most_tokens:
            check_budget(self.most_tokens, self.most_sequences or 1)
        for name, known in {"cache_dtype": CACHE_FORMS, "head": HEADS, "cuda_graphs": GRAPHS}.items():
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name}={getattr(self, name)} is not known: take one of {', '.join(known)}")
