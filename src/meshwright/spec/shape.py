"""ModelShape: the integers and flags of a transformer. No rank counts, no dtype, no training choice."""

from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    `linear` divides every frequency by `factor`. `llama3` (Llama-3.1 report) keeps the fast ones, divides the slow
    ones, blends between. `yarn` (Peng et al. 2023, arXiv:2309.00071) blends by rotations and scales the attention.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_positions: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    """YaRN: numerator of the attention factor; 0 = not given (the paper's 0.1 ln(factor) + 1)."""
    mscale_all_dim: float = 0.0
    """YaRN: its denominator; DeepSeek also multiplies the softmax scale by mscale_all_dim's value squared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """Mixture of experts in place of the MLP of most layers."""

    experts: int
    top_k: int
    ffn: int
    """Inner width of one expert."""
    shared_experts: int = 0
    """Experts every token visits, fused into one MLP of width shared_experts * ffn."""
    first_dense: int = 0
    """Number of leading layers that keep a dense MLP."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    groups: int = 1
    """Experts form groups; only those of the best `top_groups` may be chosen (DeepSeek-V3)."""
    top_groups: int = 1
    routed_scale: float = 1.0
    correction_bias: bool = False
    """A buffer, one number per expert, added to the score for choosing only (DeepSeek-V3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values through a low rank."""

    q_rank: int
    """0 = queries are projected directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One transformer. Letters as in docs/notation.md: V vocab, L layers, D hidden, H heads, K kv_heads, E head_dim, F ffn."""

    name: str = "custom"
    family: Literal["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt2"] = "llama"
    """Whose Hugging Face layout it is written in."""
    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    """0 = as many as heads (MHA); 1 = MQA; between = GQA."""
    head_dim: int = 0
    """0 = hidden / heads."""
    ffn: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    mlp: Literal["swiglu", "gelu_tanh", "gelu"] = "swiglu"
    positions: Literal["rope", "learned"] = "rope"
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    """Rotary pairs are neighbours (x0, x1) as in DeepSeek, not halves (x0, x_{E/2})."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on every query and key head (Qwen3)."""
    window: int = 0
    """Sliding window in tokens: a query sees itself and the window - 1 before it; 0 = all before it."""
    window_from_layer: int = 0
    """First layer that uses the window (Qwen2's max_window_layers)."""
    tied: bool = False
    moe: MoEShape | None = None
    mla: MLAShape | None = None

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim == 0:
            if self.heads and self.hidden % self.heads:
                raise PlanError(
                    f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}: "
                    f"give model.head_dim, or take hidden={self.hidden // self.heads * self.heads or self.heads}"
                )
            object.__setattr__(self, "head_dim", self.hidden // max(1, self.heads))
        self._check()

    def _check(self) -> None:
        for field in ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            if getattr(self, field) < 1:
                raise PlanError(f"model.{field}={getattr(self, field)} must be at least 1")
        if self.heads % self.kv_heads:
            nearest = max(k for k in range(1, self.kv_heads + 1) if self.heads % k == 0)
            raise PlanError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}: take kv_heads={nearest}"
            )
        if self.positions == "rope" and self.head_dim % 2 and self.mla is None:
            raise PlanError(
                f"model.head_dim={self.head_dim} must be even for rotary positions: take {self.head_dim + 1}"
            )
        if self.moe is not None:
            self._check_moe(self.moe)
        if not self.norm_eps > 0 or self.norm_eps > 1:
            raise PlanError(f"model.norm_eps={self.norm_eps} must lie in (0, 1]")
        if not 0 < self.rope_theta < float("inf"):
            raise PlanError(f"model.rope_theta={self.rope_theta} must be a positive number")
        if self.window < 0:
            raise PlanError(f"model.window={self.window} must be 0 (off) or a number of tokens")

    @staticmethod
    def _check_moe(moe: MoEShape) -> None:
        if not 1 <= moe.top_k <= moe.experts:
            raise PlanError(f"model.moe.top_k={moe.top_k} must lie between 1 and model.moe.experts={moe.experts}")
        if moe.ffn < 1 or moe.shared_experts < 0 or moe.first_dense < 0:
            raise PlanError("model.moe: ffn must be at least 1, shared_experts and first_dense at least 0")
        if moe.groups < 1 or moe.experts % moe.groups or not 1 <= moe.top_groups <= moe.groups:
            raise PlanError(
                f"model.moe.experts={moe.experts} must split evenly into groups={moe.groups}, "
                f"and top_groups={moe.top_groups} must lie between 1 and that"
            )
        if moe.top_k > moe.experts // moe.groups * moe.top_groups:
            raise PlanError(
                f"model.moe.top_k={moe.top_k} exceeds the {moe.experts // moe.groups * moe.top_groups} experts "
                f"of the {moe.top_groups} chosen groups"
            )

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and layer >= self.moe.first_dense

    def window_of(self, layer: int) -> int:
        """Sliding window of a layer in tokens; 0 = none."""
        return self.window if layer >= self.window_from_layer else 0

    @property
    def rope_dim(self) -> int:
        """How many dims of a head are rotated."""
        return self.mla.rope_dim if self.mla else self.head_dim
