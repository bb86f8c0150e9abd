"""How a serving engine uses its machine."""

from dataclasses import dataclass
from typing import Literal

import torch

from meshwright.kernels.kept_numbers import FORMS, CacheForm
from meshwright.serve.prepared_layers import HEADS, HeadForm
from meshwright.serve.scheduler import check_budget
from meshwright.serve.speculation import Speculation
from meshwright.spec.errors import ArgumentError
from meshwright.spec.prompt_chunks import BESIDE_ANSWERS

Graphs = Literal["auto", "on", "off"]
"""Whether steps are CUDA graphs; auto: where they can be."""
GRAPHS: tuple[Graphs, ...] = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine uses its machine."""

    exact: bool = False
    """An answer's bits depend on its own request alone: not on others, chunks, hits of the cache, or preemption. On
    CPUs. Else they depend on these by the rounding of sums in another order."""
    cache_bytes: int = 2**30
    """Most bytes of keys and values; less where `most_sequences` of the model's length take less."""
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
    most_tokens: int = 512
    """Of a step: new tokens of all sequences, and chunks of prompts."""
    prompt_tokens: int = 0
    """Most tokens of prompts in a step in which answers grow: fewer make a long prompt slower and those answers
    steadier. 0 = 128 on a CPU, and as many as a step has on a GPU."""
    most_sequences: int = 64
    """Answers that are made at once; others wait."""
    longest: int = 0
    """Most tokens of prompt and answer; 0 = the model's positions."""
    packed: bool = True
    """On a CPU, copies of the model's matrices in the order in which products of few rows read them: as large as the
    matrices (those that read one input are kept side by side, too), in fp32 where the CPU has no units for 16 bits."""
    compiled: bool = True
    """On a CPU with a C compiler, and in fp32: loops that are compiled in the first second take the place of several
    operations of torch each. Answers of the other way differ by rounding."""
    speculation: Speculation | None = None
    """Guesses of several tokens that are computed in one step; None = there are none. Answers stay what they are; those
    that keep to a schema or regex have no guesses."""
    head: HeadForm = "model"
    """`int8`: the head's matrix is rounded to 8 bits, as the hidden states are that it multiplies; each row has a scale
    of its own. A quantized model's head is not quantized."""
    cuda_graphs: Graphs = "auto"
    """On a GPU, steps without chunks of prompts are launched as one CUDA graph for each number of rows, captured when
    there has been need of it (step_graphs.py). `on`: refused where they cannot be. Answers differ by rounding, since
    rows are padded; rows of adapters run as they are."""

    def beside_answers(self, device: torch.device) -> int:
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
            "cache_bytes": 1,
            "host_cache_bytes": 0,
            "copies_bytes": 0,
            "longest": 0,
            "prompt_tokens": 0,
        }.items():
            if getattr(self, name) < least:
                raise ArgumentError(f"{name}={getattr(self, name)} must be at least {least}")
        check_budget(self.most_tokens, self.most_sequences)
        for name, known in {"cache_dtype": FORMS, "head": HEADS, "cuda_graphs": GRAPHS}.items():
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name}={getattr(self, name)} is not known: take one of {', '.join(known)}")
