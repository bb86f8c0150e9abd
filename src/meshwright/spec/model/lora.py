"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): which matrices have one, and its scale.

    y = x W^T + s (x A^T) B^T        W (out, in) frozen; A (rank, in) and B (out, rank) trained; s = alpha / rank

All other parameters of the model are frozen. The inventory lists A and B beside W.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.errors import PlanError, printable
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme, find_scheme

SAME = "same"
"""Value of `base`: frozen matrices have the format of all weights."""
LARGEST_RANK = 2**16
NONE = "none"
"""Value of `targets`: no matrix has an adapter. Only for a teacher, whose matrices may be codes and are not trained."""
NAMES = {
    "attention": ("q", "k", "v", "o", "q_down", "q_up", "kv_down", "kv_up"),
    "mlp": ("gate", "up", "down"),
}
"""Groups of targets: the matrices of attention, plain or latent, and those of every MLP, experts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAShape:
    """Low-rank adapters, trained in place of the weights themselves."""

    rank: int
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """Scale of the adapter's output: it is multiplied by alpha / rank."""
    targets: str = "all"
    """Matrices with an adapter: `all`, `attention`, `mlp`, or names such as q,v (attention: q k v o, mlp: gate up
    down). `none` is for a teacher whose matrices `base` holds as codes."""
    dropout: float = 0.0
    """Share of the adapter's input set to 0 while training."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, for large ranks (Kalajdzievski 2023, arXiv:2312.03732)."""
    base: str = SAME
    """Format of the frozen matrices: `same` as all weights, or a quantization scheme whose matrices are restored for
    each product: nf4-double, nf4, int4-hqq ... (QLoRA), llm-int8, or the layout of a folder, such as
    int4-g128-zeros-fp16."""
    dora: bool = False
    """Train the length of each row of the sum separately from its direction (Liu et al. 2024, arXiv:2402.09353)."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank < LARGEST_RANK:
            raise PlanError(f"model.lora.rank={self.rank} must be at least 1 and below {LARGEST_RANK}")
        if not 0 < self.alpha < math.inf:
            raise PlanError(f"model.lora.alpha={self.alpha} must be a number above 0")
        if not 0 <= self.dropout < 1:
            raise PlanError(f"model.lora.dropout={self.dropout} must lie in [0, 1)")
        if self.base != SAME and (self.scheme is None or not self.scheme.trains_beside):
            bases = [name for name in SCHEMES if (scheme := find_scheme(name)) and scheme.trains_beside]
            raise PlanError(
                f"model.lora.base={printable(self.base)} is no format beside which adapters can be trained: take "
                f"same, {', '.join(bases)}, or a layout as int4-g128-zeros-fp16"
            )
        matrices = [name for names in NAMES.values() for name in names]
        for name in self.targets.split(",") if self.targets != NONE else ():
            if name not in ("all", *NAMES, *matrices):
                raise PlanError(
                    f"model.lora.targets={printable(self.targets)}: {name!r} names no matrix; take all, attention, "
                    f"mlp, or names of {', '.join(matrices)}"
                )

    def without(self, matrices: Sequence[str]) -> list[str]:
        """Return target names that are not among a layer's matrices."""
        groups = ("all", NONE, *NAMES)
        return [name for name in self.targets.split(",") if name not in groups and name not in matrices]

    @property
    def scheme(self) -> Scheme | None:
        """Scheme of the frozen matrices. None = they have the format of all weights."""
        return find_scheme(self.base)

    @property
    def scale(self) -> float:
        """Factor s of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """Return whether a matrix has an adapter, by its name: layers.3.attention.q.weight, layers.3.mlp.experts.up."""
        matrix = name.removesuffix(".weight").rpartition(".")[2]
        targets = self.targets.split(",")
        return "all" in targets or matrix in targets or any(matrix in NAMES.get(group, ()) for group in targets)
