"""A layer as operations and kept tensors, and what each recompute policy keeps and repeats."""

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.cost.activations import NONE, Logits
from meshwright.planner.cost.backward import NONE as NOTHING
from meshwright.planner.cost.backward import Backward
from meshwright.planner.cost.work import KeptBytes, LayerOperation


class PolicyBytes(NamedTuple):
    """Bytes of a layer under a recompute policy."""

    kept_bytes: float
    """Bytes from the forward to the backward pass of a micro-batch."""
    again_bytes: float
    """Restored for the layer's backward pass, beside what was kept. Norms are restored one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """A layer (or the embedding, or the head) as operations and kept tensors.

    `boundary_bytes`: its input, which is all that full recomputation keeps. `transient_bytes`: alive only inside its
    backward pass. `backward`: the same for Meshwright's engine, moment by moment. `logits`: what head and loss keep.
    """

    operations: tuple[LayerOperation, ...]
    tensors: tuple[KeptBytes, ...] = ()
    boundary_bytes: float = 0.0
    transient_bytes: float = 0.0
    backward: Backward = NOTHING
    logits: Logits = NONE
    tail: int = 0
    """Number of last operations whose outputs are not kept. Recomputation ends before them."""
    keeps_norms: bool = True
    """Outputs of norms are kept if nothing is recomputed.

    Compiled code recomputes them (spec/rules/compilation.py).
    """

    @property
    def keeps_core(self) -> bool:
        """True if the core's output can be kept while everything else is recomputed.

        The compiler does not recompute a part that it must leave alone (parallel/blocks/compiling.py): experts whose
        rows travel.
        """
        return any(tensor.part == "core" for tensor in self.tensors)

    def by_policy(self, *, alone: bool = True) -> dict[str, PolicyBytes]:
        """Return the bytes under each recompute policy.

        `alone`: tensors are restored one by one, as in Meshwright's engine. Otherwise everything that was not kept
        exists beside what was.
        """
        none = norms = selective = core = dropped = widest = 0.0
        # one walk over the tensors sums up all policies, since a search asks for each
        for _, all_bytes, selective_bytes, part in self.tensors:
            if part != "norm":
                norms += all_bytes
            if part != "norm" or self.keeps_norms:
                none += all_bytes
                selective += selective_bytes
                dropped += max(0.0, all_bytes - selective_bytes)
                if part == "norm":
                    widest = max(widest, all_bytes)
            if part in ("core", "scores"):
                core += all_bytes
        kept_by_policy = {"none": none, "norms": norms, "selective": selective,
                "all-but-attention": self.boundary_bytes + core, "full": self.boundary_bytes}  # fmt: skip
        # restored one by one, only the largest exists beside the others; "norms" needs one norm at a time
        again_by_policy = {"norms": widest, "selective": dropped} if alone else {}
        return {
            policy: PolicyBytes(size, again_by_policy.get(policy, max(0.0, none - size)))
            for policy, size in kept_by_policy.items()
        }

    def kept_bytes(self, recompute: str) -> float:
        """Return the bytes from the forward to the backward pass of a micro-batch."""
        return self.by_policy()[recompute].kept_bytes
