"""A layer as operations and as kept tensors, and what each recompute policy keeps of it and makes again."""

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.cost.activations import NONE, Logits
from meshwright.planner.cost.backward import NONE as NOTHING
from meshwright.planner.cost.backward import Backward
from meshwright.planner.cost.work import KeptBytes, LayerOperation


class PolicyBytes(NamedTuple):
    """Bytes of a layer under a recompute policy."""

    kept: float
    """From the forward to the backward pass of a micro-batch."""
    again: float
    """Brought back for the layer's backward pass, beside what was kept; norms one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """A layer (or the embedding, or the head) as operations and as kept tensors.

    `boundary_bytes`: its input, all that full recomputation keeps. `transient_bytes`: alive only inside its backward
    pass; `backward`: the same of this package's engine, place by place. `logits`: what head and loss keep.
    """

    operations: tuple[LayerOperation, ...]
    kept: tuple[KeptBytes, ...] = ()
    boundary_bytes: float = 0.0
    transient_bytes: float = 0.0
    backward: Backward = NOTHING
    logits: Logits = NONE
    tail: int = 0
    """Last operations that nothing is kept behind, so that recomputation ends before them."""
    keeps_norms: bool = True
    """Where nothing is recomputed, what norms make is kept; compiled code makes it again (spec/compiled_blocks.py)."""

    @property
    def keeps_core(self) -> bool:
        """Whether the attention core's results can be kept where all else is made again. The compiler does not
        recompute a part that it must leave alone (parallel/compiling.py): experts whose rows travel."""
        return any(kept.of == "core" for kept in self.kept)

    def by_policy(self, *, alone: bool = True) -> dict[str, PolicyBytes]:
        """Of each recompute policy. `alone`: tensors come back one by one, as in this package's engine; else all that
        was not kept stands beside what was."""
        none = norms = selective = core = dropped = widest = 0.0
        for _, whole, less, part in self.kept:
            if part != "norm":
                norms += whole
            if part != "norm" or self.keeps_norms:
                none += whole
                selective += less
                dropped += max(0.0, whole - less)
                if part == "norm":
                    widest = max(widest, whole)
            if part in ("core", "scores"):
                core += whole
        kept = {"none": none, "norms": norms, "selective": selective,
                "all-but-attention": self.boundary_bytes + core, "full": self.boundary_bytes}  # fmt: skip
        again = {"norms": widest, "selective": dropped} if alone else {}
        return {policy: PolicyBytes(size, again.get(policy, max(0.0, none - size))) for policy, size in kept.items()}

    def kept_bytes(self, recompute: str) -> float:
        """From the forward to the backward pass of a micro-batch."""
        return self.by_policy()[recompute].kept
