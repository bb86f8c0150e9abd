"""ModelShape: the integers and flags of a transformer. No rank counts, no dtype, no training choice.

A shape may have low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685). All its other parameters are then frozen:

    y = x W^T + s (x A^T) B^T        W (out, in) frozen; A (rank, in) and B (out, rank) trained; s = alpha / rank
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.spec.errors import ArgumentError, PlanError, printable
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme, find_scheme
from meshwright.spec.model.unbuilt_parts import LinearAttention, UnbuiltParts
from meshwright.spec.units import many

SAME_BASE = "same"
"""Value of `base`: frozen matrices have the format of all weights."""
LARGEST_RANK = 2**16
NO_TARGETS = "none"
"""Value of `targets`: no matrix has an adapter. Only for a teacher, whose matrices may be codes and are not trained."""
TARGET_GROUPS = {
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
    base: str = SAME_BASE
    """Format of the frozen matrices: `same` as all weights, or a quantization scheme whose matrices are restored for
    each product: nf4-double, nf4, int4-hqq ... (QLoRA), llm-int8, or the layout of a folder, such as
    int4-g128-zeros-fp16."""
    dora: bool = False
    """Train the length of each row of the sum separately from its direction (Liu et al. 2024, arXiv:2402.09353)."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank < LARGEST_RANK:
            raise ArgumentError("model.lora.rank", self.rank, f"must be at least 1 and below {LARGEST_RANK}")
        if not 0 < self.alpha < math.inf:
            raise PlanError(f"model.lora.alpha={self.alpha} must be a number above 0")
        if not 0 <= self.dropout < 1:
            raise PlanError(f"model.lora.dropout={self.dropout} must lie in [0, 1)")
        if self.base != SAME_BASE and (self.scheme is None or not self.scheme.trains_beside):
            bases = [name for name in SCHEMES if (scheme := find_scheme(name)) and scheme.trains_beside]
            raise PlanError(
                f"model.lora.base={printable(self.base)} is no format on which adapters can be trained: take "
                f"same, {', '.join(bases)}, or a layout as int4-g128-zeros-fp16"
            )
        matrices = [name for names in TARGET_GROUPS.values() for name in names]
        for name in self.targets.split(",") if self.targets != NO_TARGETS else ():
            if name not in ("all", *TARGET_GROUPS, *matrices):
                raise ArgumentError(
                    "model.lora.targets",
                    self.targets,
                    remedy=f"{name!r} names no matrix; take all, attention, mlp, or names of {', '.join(matrices)}",
                )

    def without(self, matrices: Sequence[str]) -> list[str]:
        """Return target names that are not among a layer's matrices."""
        groups = ("all", NO_TARGETS, *TARGET_GROUPS)
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
        return "all" in targets or matrix in targets or any(matrix in TARGET_GROUPS.get(group, ()) for group in targets)


LARGEST = 2**31
"""Upper bound of sizes of tensors. It keeps a typing error from filling the memory."""
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the trained length.

    `linear` divides every frequency by `factor`. `llama3` (Llama-3.1 report) keeps the fast ones, divides the slow
    ones, blends between. `yarn` (Peng et al. 2023, arXiv:2309.00071) blends by rotations and scales the attention.
    """

    kind: Literal["linear", "llama3", "yarn"]
    """linear, llama3 or yarn."""
    factor: float
    """Ratio of the longest sequence to original_positions."""
    original_positions: int
    """Positions the unscaled model was trained on."""
    low_frequency_factor: float = 1.0
    """llama3: a frequency with fewer rotations over original_positions is divided by factor."""
    high_frequency_factor: float = 4.0
    """llama3: a frequency with more rotations over original_positions is kept."""
    beta_fast: float = 32.0
    """yarn: rotations over original_positions from which a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: rotations up to which a frequency is divided by factor."""
    mscale: float = 0.0
    """YaRN: numerator of the attention factor; 0 = the paper's 0.1 ln(factor) + 1."""
    mscale_all_dim: float = 0.0
    """YaRN: its denominator; DeepSeek also multiplies the softmax scale by mscale_all_dim's value squared."""

    def __post_init__(self) -> None:
        for field in ("factor", "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, field) < math.inf:
                raise PlanError(f"model.rope_scaling.{field}={getattr(self, field)} must be a number above 0")
        if self.original_positions < 1:
            raise PlanError(f"model.rope_scaling.original_positions={self.original_positions} must be at least 1")
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            apart = getattr(self, high) - getattr(self, low)
            if apart < 0 or (apart == 0 and low == "low_frequency_factor"):  # Kimi-K2 has one beta for both
                raise PlanError(
                    f"model.rope_scaling.{low}={getattr(self, low)} must be below {high}={getattr(self, high)}"
                )
        for field in ("mscale", "mscale_all_dim"):
            if not 0 <= getattr(self, field) < math.inf:
                raise PlanError(f"model.rope_scaling.{field}={getattr(self, field)} must be a number of 0 or more")


def temperature(factor: float, weight: float) -> float:
    """Return YaRN's 0.1 * weight * ln(factor) + 1 (arXiv:2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Mixture of experts in place of the MLP of most layers."""

    experts: int
    """Routed experts of a layer."""
    top_k: int
    """Routed experts that one token visits."""
    ffn: int
    """Inner width of one expert."""
    shared_experts: int = 0
    """Experts every token visits, fused into one MLP of width shared_experts * ffn."""
    first_dense: int = 0
    """Number of leading layers that keep a dense MLP."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores."""
    normalize_top_k: bool = True
    """The scores of the chosen experts are divided by their sum."""
    groups: int = 1
    """Groups of experts; only experts of the best `top_groups` may be chosen (DeepSeek-V3)."""
    top_groups: int = 1
    """Groups a token may choose from."""
    routed_scale: float = 1.0
    """Factor on the sum of the routed experts."""
    correction_bias: bool = False
    """A buffer, one number per expert, is added to the scores for the choice only (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise PlanError(f"model.moe.top_k={self.top_k} must lie between 1 and model.moe.experts={self.experts}")
        if not 1 <= self.ffn < LARGEST or self.shared_experts < 0 or self.first_dense < 0:
            raise PlanError("model.moe: ffn must be at least 1, shared_experts and first_dense at least 0")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise PlanError(
                f"model.moe.experts={self.experts} must split evenly into groups={self.groups}, "
                f"and top_groups={self.top_groups} must lie between 1 and that"
            )
        reachable = self.experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise PlanError(
                f"model.moe.top_k={self.top_k} exceeds the {reachable} experts of the {self.top_groups} chosen groups"
            )
        if not 0 < self.routed_scale < math.inf:
            raise PlanError(f"model.moe.routed_scale={self.routed_scale} must be a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values through a low rank."""

    q_rank: int
    """Rank through which queries go; 0 = they are projected directly."""
    kv_rank: int
    """Rank through which keys and values go; the cache holds it and rope_dim."""
    nope_dim: int
    """Dims of a query and key head without rotation."""
    rope_dim: int
    """Rotated dims of a query head; those of the key are shared by all heads."""
    v_dim: int
    """Dims of a value head."""

    def __post_init__(self) -> None:
        for field in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            if not 1 <= getattr(self, field) < LARGEST:
                raise PlanError(f"model.mla.{field}={getattr(self, field)} must be at least 1")
        if not 0 <= self.q_rank < LARGEST:
            raise PlanError(f"model.mla.q_rank={self.q_rank} must be 0 (none) or more")
        if self.rope_dim % 2:
            raise PlanError(f"model.mla.rope_dim={self.rope_dim} must be even: take {self.rope_dim + 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One transformer. Its letters (V vocab, L layers, D hidden, H heads, ...) are those of docs/notation.md."""

    name: str = "custom"
    """Name in reports."""
    family: Literal["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt2", "phi3"] = (
        "llama"
    )
    """Hugging Face layout in which it is written."""
    vocab: int
    """Rows of the embedding; at least as many as the tokenizer has tokens."""
    layers: int
    """Transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int = 0
    """Key and value heads; 0 = as many as heads (MHA); 1 = MQA; between = GQA."""
    head_dim: int = 0
    """Dims of a query or key head; 0 = hidden / heads, or nope_dim + rope_dim with mla."""
    ffn: int
    """Inner width of the MLP (of the dense layers, if there are experts)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """rmsnorm has a weight, layernorm a weight and a bias."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norms."""
    mlp: Literal["swiglu", "gelu_tanh", "gelu"] = "swiglu"
    """swiglu has three matrices, the others two."""
    positions: Literal["rope", "learned"] = "rope"
    """rope rotates queries and keys; learned adds a trained vector per position."""
    max_positions: int
    """Longest sequence the model is made for; with learned positions a hard limit."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the frequencies; null = none."""
    rope_interleaved: bool = False
    """Rotary pairs are neighbours (x0, x1) as in DeepSeek, not halves (x0, x_{E/2})."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Biases of the dense MLP."""
    qk_norm: bool = False
    """RMSNorm over head_dim on every query and key head (Qwen3)."""
    window: int = 0
    """Sliding window in tokens: a query sees itself and the window - 1 before it; 0 = all before it."""
    window_from_layer: int = 0
    """First layer that uses the window (Qwen2's max_window_layers)."""
    tied: bool = False
    """The head is the embedding, transposed."""
    moe: MoEShape | None = None
    """Mixture of experts; null = every layer is dense."""
    mla: MLAShape | None = None
    """Multi-head latent attention; null = plain heads."""
    unbuilt: UnbuiltParts | None = None
    """Parts of other families that can be planned but not trained; null = the engine supports all parts."""
    lora: LoRAShape | None = None
    """Low-rank adapters, which alone are trained; null = every weight is trained."""

    def __post_init__(self) -> None:
        # Defaults that follow from other fields. The dataclass is frozen, hence object.__setattr__.
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim == 0 and self.mla is not None:
            object.__setattr__(self, "head_dim", self.mla.nope_dim + self.mla.rope_dim)
        if self.head_dim == 0:
            if self.heads and self.hidden % self.heads:
                raise PlanError(
                    f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}: "
                    f"give model.head_dim, or take hidden={self.hidden // self.heads * self.heads or self.heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden // max(1, self.heads))
        self._check()

    def __hash__(self) -> int:
        # Keys of the planner's memos hold shapes. All fields would take four times as long, and few shapes share these.
        return hash((self.name, self.layers, self.hidden))

    def _check(self) -> None:
        # Sizes come first: what follows divides by them.
        for field in ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            if not 1 <= getattr(self, field) < LARGEST:
                raise PlanError(f"model.{field}={getattr(self, field)} must be at least 1 and below 2**31")
        if self.layers > MOST_LAYERS:
            raise PlanError(f"model.layers={self.layers} must be at most {MOST_LAYERS}")
        if self.heads % self.kv_heads:
            nearest = max(k for k in range(1, self.kv_heads + 1) if self.heads % k == 0)
            raise PlanError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}: take kv_heads={nearest}"
            )
        if self.positions == "rope" and self.head_dim % 2 and self.mla is None:
            raise PlanError(
                f"model.head_dim={self.head_dim} must be even for rotary positions: take {self.head_dim + 1}"
            )
        if self.mla is not None:
            self._check_latent()
        if self.lora is not None and (missing := self.lora.without(self.matrices)):
            raise ArgumentError(
                "model.lora.targets",
                self.lora.targets,
                remedy=f"this model has no matrix {missing[0]!r}; take names of {', '.join(self.matrices)}",
            )
        if self.lora is not None and self.lora.dora and self.lora.dropout:
            raise PlanError(
                "model.lora.dora=true scales the whole output of a matrix, and model.lora.dropout applies to the "
                "adapter alone: take model.lora.dropout=0"
            )
        if self.lora and self.lora.dora and self.moe and any(map(self.lora.adapts, TARGET_GROUPS["mlp"])):
            raise PlanError(
                "model.lora.dora=true has no form for stacks of experts: take model.lora.targets=attention, or "
                "model.lora.dora=false"
            )
        if not self.norm_eps > 0 or self.norm_eps > 1:
            raise PlanError(f"model.norm_eps={self.norm_eps} must lie in (0, 1]")
        if not 0 < self.rope_theta < float("inf"):
            raise PlanError(f"model.rope_theta={self.rope_theta} must be a positive number")
        if self.window < 0 or self.window_from_layer < 0:
            raise PlanError(
                f"model.window={self.window} must be 0 (off) or a number of tokens, "
                f"and model.window_from_layer={self.window_from_layer} a layer"
            )

    @property
    def attention_words(self) -> str:
        """The kind of attention, by what it keeps of each token: MHA, GQA, MQA or MLA, with its numbers."""
        if self.mla is not None:
            return f"MLA: latent of {self.mla.kv_rank}, key of {self.mla.rope_dim}"
        kind = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        return f"{kind}: {many(self.kv_heads, 'key head')}"

    def _check_latent(self) -> None:
        """Raise PlanError for fields of plain heads that latent attention does not have."""
        if self.kv_heads != self.heads:
            raise PlanError(
                f"model.kv_heads={self.kv_heads} groups key heads, and model.mla makes those of all "
                f"{self.heads} heads from one vector: take model.kv_heads=0"
            )
        if self.qk_norm:
            raise PlanError(
                "model.qk_norm=true norms plain query and key heads, and model.mla norms its low ranks instead: "
                "take model.qk_norm=false"
            )
        if self.positions != "rope":
            raise PlanError(
                f"model.positions={self.positions} leaves nothing for model.mla.rope_dim={self.rope_dim} to rotate: "
                "take model.positions=rope"
            )

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of a layer's matrices that can have an adapter: those of attention, then those of MLPs."""
        # Latent attention has other matrices, and the gated delta rule two more.
        latent = (*(("q_down", "q_up") if self.mla.q_rank else ("q",)), "kv_down", "kv_up") if self.mla else ()
        rates = (
            ("rate", "decay") if self.unbuilt is not None and self.unbuilt.linear and self.unbuilt.linear.delta else ()
        )
        attention = latent or ("q", "k", "v", *rates)
        return (*attention, "o", *(("gate",) if self.mlp == "swiglu" else ()), "up", "down")

    @property
    def base(self) -> "ModelShape":
        """The same shape without adapters."""
        return replace(self, lora=None) if self.lora else self

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether this layer's MLP is a mixture of experts."""
        if self.moe is None or layer < self.moe.first_dense:
            return False
        return self.unbuilt is None or (layer + 1) % self.unbuilt.routed_every == 0

    @property
    def routed_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        if self.unbuilt is not None and self.unbuilt.routed_every > 1:
            return sum(map(self.is_moe_layer, range(self.layers)))
        return max(0, self.layers - self.moe.first_dense) if self.moe else 0

    def linear_of(self, layer: int) -> LinearAttention | None:
        """Return the linear attention of a layer. None = it has keys and values."""
        linear = self.unbuilt.linear if self.unbuilt else None
        return linear if linear and linear.covers(layer) else None

    def window_of(self, layer: int) -> int:
        """Return the sliding window of a layer in tokens. 0 = none."""
        if self.unbuilt is not None and not self.unbuilt.windowed(layer):
            return 0
        return self.window if layer >= self.window_from_layer else 0

    @property
    def mixed_windows(self) -> bool:
        """Some layers have a window and others none."""
        return bool(self.window and (self.window_from_layer or (self.unbuilt and self.unbuilt.full_every)))

    @property
    def freezes_head(self) -> bool:
        """The head has no gradient: under adapters, unless it is trained whole."""
        return self.lora is not None and not (self.unbuilt and "head" in self.unbuilt.whole)

    @property
    def plan_only(self) -> str:
        """Reason why the engine cannot run it, without a final period. Empty = it can."""
        parts = self.unbuilt.named() if self.unbuilt else ()
        return f"plan only: the engine does not have {', '.join(parts)}" if parts else ""

    @property
    def rope_dim(self) -> int:
        """Rotated dims of a head."""
        return self.mla.rope_dim if self.mla else self.head_dim
