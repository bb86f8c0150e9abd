"""Options of a serving engine: how it uses its machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from meshwright.serving.engine.scheduler import check_budget
from meshwright.spec.errors import ArgumentError
from meshwright.spec.plan.execution import (
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

    from meshwright.serving.engine.speculation import Speculation

Graphs = Literal["auto", "on", "off"]
"""Use of CUDA graphs for steps. auto = if possible."""
GRAPHS: tuple[Graphs, ...] = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Use of a machine by an engine: memory, step sizes, number formats."""

    exact: bool = False
    """An answer's bits depend on its own request alone, not on others, chunks, cache hits or preemption. CPUs only.

    Otherwise they depend on these through the rounding of sums in another order.
    """
    cache_bytes: int = 0
    """Most bytes of keys and values. Less is taken if `most_sequences` of the model's length need less.

    0 = 1 GiB on a CPU, and on a GPU `memory_share` of its free memory.
    """
    memory_share: float = MEMORY_SHARE
    """Share of a GPU's memory for keys and values, of what weights, CUDA graphs and the largest step leave free.

    It is measured when the engine starts, and not used with `cache_bytes`.
    """
    host_cache_bytes: int = 0
    """Most bytes of host memory for cached prefixes whose blocks were given away. 0 = they are computed again.

    This is for a model on a GPU. On a CPU it is the same memory as the cache, and holds prefixes beyond what
    `most_sequences` can fill.
    """
    cache_dtype: CacheForm = "model"
    """Format of keys and values: the model's dtype, or 8 bits (`int8`, `fp8`) with a scale per position and head.

    With 8 bits two to nearly four times as many positions fit, and answers change a little.
    """
    copies_bytes: int = 2**28
    """Most bytes of contiguous second copies of keys and values of growing answers, which make attention faster.

    0 = none.
    """
    block: int = 16
    """Positions of a cache block."""
    most_tokens: int = 0
    """Tokens per step: new tokens of all sequences, and chunks of prompts.

    0 = 512 on a CPU, and on a GPU as many as its products need to reach 90 % of their rate
    (spec/plan/execution.py).
    """
    prompt_tokens: int = 0
    """Most prompt tokens in a step in which answers grow. Fewer slow long prompts down and keep those answers steady.

    0 = 128 on a CPU, and as many as a step has on a GPU.
    """
    most_sequences: int = 0
    """Answers that are generated at once; others wait. 0 = 64 on a CPU, 256 on a GPU."""
    longest: int = 0
    """Most tokens of prompt and answer. 0 = the model's positions."""
    packed: bool = True
    """On a CPU, keep copies of the matrices in the order in which products of few rows read them.

    They are as large as the matrices, and in fp32 if the CPU has no 16-bit units. Matrices that read one input lie side
    by side.
    """
    compiled: bool = True
    """On a CPU with a C compiler and in fp32, compiled loops replace several torch operations each.

    They are compiled in the first second. Answers differ by rounding.
    """
    second_layouts: bool = False
    """On a GPU, let products with 4-bit codes use a second memory layout of them if that is faster.

    These are torch's and gemlite's order, or a 16-bit copy. All ways are timed when the engine starts; those without a
    second layout always are.
    """
    speculation: "Speculation | None" = None
    """Guessing of several tokens that are computed in one step. None = off.

    Answers stay the same. Those that follow a schema or regex have no guesses.
    """
    head: HeadForm = "model"
    """`int8` rounds the head's matrix and its inputs to 8 bits, with a scale per row.

    A quantized model's head is not quantized.
    """
    cuda_graphs: Graphs = "auto"
    """On a GPU, launch steps without prompt chunks as one CUDA graph per number of rows (step_graphs.py).

    `on` is refused if graphs are impossible. Answers differ by rounding, since rows are padded. Rows of adapters run
    without graphs.
    """
    run_ahead: bool | None = None
    """Launch a step before the tokens of the one before it are read, so the device need not wait for the host.

    None = on a GPU. Steps still wait while answers have a schema, regex, penalties or beams, with `speculation`, on
    several ranks, and when the cache is short of blocks. Answers differ by rounding at most.
    """
    warm_start: bool = True
    """Capture all CUDA graphs when the engine starts.

    Otherwise each is captured when a step first needs it. Requests then wait for captures, and a short use of the
    engine does not.
    """
    record: Path | None = None
    """New file to which the engine writes what each step does (serving_record.py). None = it writes nothing."""
    on_progress: Callable[[str], None] | None = None
    """Called with a line for people while the engine starts on a GPU: memory, and captured graphs."""

    def on_device(self, device: "torch.device", hidden: int) -> Self:
        """Replace zeros by this device's defaults, for a model with `hidden` numbers per token.

        The cache of a GPU stays 0: its free memory is measured once weights are loaded.
        """
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
        return replace(self, most_sequences=sequences, most_tokens=tokens, cache_bytes=cache_bytes, run_ahead=ahead)

    def beside_answers(self, device: "torch.device") -> int:
        """Return `prompt_tokens` on a device."""
        return self.prompt_tokens or (BESIDE_ANSWERS if device.type == "cpu" else self.most_tokens)

    @property
    def most_rows(self) -> int:
        """Rows of the largest step without prompt chunks."""
        guesses = self.speculation.tokens if self.speculation else 0
        return min(self.most_tokens, self.most_sequences * (1 + guesses))

    def __post_init__(self) -> None:
        """Raise ArgumentError, naming the field, for values without meaning."""
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
                raise ArgumentError(name, getattr(self, name), f"must be at least {least}")
        if not 0 < self.memory_share <= 1:
            raise ArgumentError("memory_share", self.memory_share, "must be above 0 and at most 1")
        if self.most_tokens:
            check_budget(self.most_tokens, self.most_sequences or 1)
        for name, known in {"cache_dtype": CACHE_FORMS, "head": HEADS, "cuda_graphs": GRAPHS}.items():
            if getattr(self, name) not in known:
                raise ArgumentError(name, getattr(self, name), "is not known", f"take one of {', '.join(known)}")
