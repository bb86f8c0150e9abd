"""Activation recomputation: keep less in the forward pass, make it again in the backward pass.

full: keep a layer's input only (Chen et al. 2016, arXiv:1604.06174). all-but-attention: also what the attention core
reads and makes, with its log-sum-exp, so that all else is made again. selective: the attention core alone is made again
(Korthikanti et al. 2022, arXiv:2205.05198, section 5), so that its S x S weights are not kept; kernels that never store
these have nothing to drop. norms: keep all but what norms make. All repeat the same operations, so loss and gradients
keep every bit.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.compat.fakes import storage_key
from meshwright.kernels.attention import Mask
from meshwright.kernels.blockwise import random_state
from meshwright.kernels.weight_gradients import same_split
from meshwright.model.attention import AttentionMetadata
from meshwright.model.kv_cache import Past
from meshwright.model.norm import LayerNorm, RMSNorm
from meshwright.model.seams import BlockCall, compute, same
from meshwright.model.transformer import Block
from meshwright.parallel import column_parallel as column_parallel  # registers its operator
from meshwright.parallel import operators as operators
from meshwright.parallel import ring as ring
from meshwright.parallel import row_parallel as row_parallel
from meshwright.parallel.saved_tensors import SavedTensorHooks, hooks_around, saving_by

MATRIX_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
    if hasattr(torch.ops.aten, name)
) | {getattr(torch.ops.meshwright, name).default for name in ("columns", "rows", "expert_product", "cpu_product")}
"""Products with weights. Batched ones (bmm) are those of the attention core."""


ATTENTION_CORES = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
        "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
) | {
    getattr(torch.ops.meshwright, name).default for name in ("varlen_attention", "varlen_dropout", "context_attention")
}  # fmt: skip
"""Of compiled code: it knows no seams, and its operators are all that a policy sees."""


EXCHANGES = frozenset({torch.ops.meshwright.enter.default, torch.ops.meshwright.leave.default})


def _policy(kept: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _call(
    block: Block,
    x: Tensor,
    metadata: AttentionMetadata,
    cache: Past | None,
    *,
    inner: BlockCall,
    contexts: Callable[[], tuple[Any, Any]] | None,
) -> tuple[Tensor, Tensor | None]:
    if not torch.is_grad_enabled() or cache is not None:
        return inner(block, x, metadata, cache)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    keep_random_state = block.draws and block.training
    result: tuple[Tensor, Tensor | None] = checkpoint(
        same_split(inner),
        block,
        x,
        metadata,
        None,
        use_reentrant=False,
        preserve_rng_state=keep_random_state,
        **options,
    )
    return result


class _NormOutput:
    """What a norm has made, for a tensor that a later operation wanted to save. Of what the norm was given `given` is
    kept until the block has saved the first of those, and from then on what `around` makes of it."""

    def __init__(self, norm: nn.Module, given: Tensor, made: Tensor, around: SavedTensorHooks) -> None:
        self.norm, self.made, self.version, self.around = norm, ref(made), made._version, around
        self.given: Tensor | None = given
        self.packed: Any = None
        self.readers = 0
        self.again: Tensor | None = None

    def is_there(self) -> bool:
        """Whether the norm's own tensor lives, so that nothing else lies at its place, and has not been overwritten."""
        made = self.made()
        return made is not None and made._version == self.version

    def pack(self) -> None:
        """For one more reader."""
        if self.given is not None:
            self.packed, self.given = self.around.pack(self.given), None
        self.readers += 1

    @torch.no_grad()
    def made_again(self) -> Tensor:
        """Once for all of its readers, and gone after the last."""
        found = self.again
        if found is None:
            found = self.norm.forward(self.around.unpack(self.packed))
        self.readers -= 1
        self.again = found if self.readers > 0 else None
        return found


class _Reading(NamedTuple):
    """What a node keeps in place of what a norm has made."""

    norm: _NormOutput
    shape: torch.Size


class _Norms:
    """The saved tensors of one call of a block: those that norms have made are made again instead."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], _NormOutput] = {}
        self.around = hooks_around()

    def mark(self, norm: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        """A forward hook of a norm."""
        if made.is_contiguous():
            self.found[_place(made)] = _NormOutput(norm, given[0].detach(), made, self.around)

    def pack(self, saved: Tensor) -> Any:
        """A norm's result as that norm's; whatever else is saved as outside of here."""
        found = self.found.get(_place(saved)) if saved.is_contiguous() else None
        if found is None or not found.is_there():
            return self.around.pack(saved)
        found.pack()
        return _Reading(found, saved.shape)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, or what the norm makes once more."""
        return (
            packed.norm.made_again().view(packed.shape) if isinstance(packed, _Reading) else self.around.unpack(packed)
        )


def _place(x: Tensor) -> tuple[Any, ...]:
    return storage_key(x.untyped_storage()), x.storage_offset(), x.numel(), x.dtype


def _call_without_norms(
    block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None, *, inner: BlockCall
) -> tuple[Tensor, Tensor | None]:
    if not torch.is_grad_enabled() or cache is not None:
        return inner(block, x, metadata, cache)
    norms = _Norms()
    handles = [
        part.register_forward_hook(norms.mark) for part in block.modules() if isinstance(part, RMSNorm | LayerNorm)
    ]
    try:
        with saving_by(SavedTensorHooks(norms.pack, norms.unpack)):
            return inner(block, x, metadata, cache)
    finally:
        for handle in handles:
            handle.remove()
        norms.found.clear()  # what is packed has its own


class _KeptAttention:
    """One call of a block and its repetitions, which take the result of attention from the first."""

    def __init__(self, inner: BlockCall) -> None:
        self.inner = inner
        self.made: Tensor | None = None
        self.learns = False
        """Whether the result needs a gradient."""
        self.random: Tensor | None = None
        """State of the generator behind attention's dropout."""

    def __call__(self, *given: Any) -> tuple[Tensor, Tensor | None]:
        """As the inner call."""
        before = _repeated.set(self)
        try:
            return self.inner(*given)
        finally:
            _repeated.reset(before)

    def attended(self, attend: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
        """Attention of the first call; what its backward pass needs is kept."""
        device, draws = given[0].device, bool(options.get("dropout"))
        if self.made is None:
            with saved_tensors_hooks(torch.Tensor.detach, same):
                made = attend(*given, **options)
            self.made, self.learns, self.random = made.detach(), made.requires_grad, None
            if draws:
                self.random = random_state(device)
            return made
        if self.random is not None:
            torch.cuda.set_rng_state(self.random, device) if device.type == "cuda" else torch.set_rng_state(self.random)
        return self.made.detach().requires_grad_(self.learns)


_repeated: ContextVar[_KeptAttention | None] = ContextVar("repeated", default=None)


def kept_attention(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As kernels.attend, for the policy all-but-attention."""

    def kept(*given: Any, **options: Any) -> Tensor:
        call = _repeated.get()
        return attend(*given, **options) if call is None else call.attended(attend, *given, **options)

    return kept


def _call_but_attention(block: Block, *given: Any, inner: BlockCall) -> tuple[Tensor, Tensor | None]:
    return _call(block, *given, inner=_KeptAttention(inner), contexts=None)


def on_some(blocks: Collection[nn.Module], call: BlockCall, others: BlockCall) -> BlockCall:
    """These blocks by one call, the others by another."""
    some = frozenset(blocks)

    def run(block: Block, *given: Any) -> tuple[Tensor, Tensor | None]:
        return (call if block in some else others)(block, *given)

    return run


def attended_again(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As kernels.attend, for the policy selective: of the core its inputs are kept, and nothing inside."""

    def again(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0) -> Tensor:
        core = partial(attend, scale=scale, dropout=dropout)
        if not torch.is_grad_enabled():
            return core(q, k, v, mask)
        out: Tensor = checkpoint(core, q, k, v, mask, use_reentrant=False, preserve_rng_state=dropout > 0)
        return out

    return again


KEPT = {
    "norms": MATRIX_PRODUCTS | ATTENTION_CORES | EXCHANGES,
    "all-but-attention": ATTENTION_CORES,
}
"""Operators whose results a policy keeps, where it goes by operators."""


def block_call(recompute: str, inner: BlockCall = compute, *, compiled: bool = False) -> BlockCall:
    """The function that runs a block under a policy, a word of layout.recompute. `inner` is what is made again; hooks
    on the block stay outside of it. `compiled`: the function will be. selective acts inside of attention."""
    if recompute in ("none", "selective"):
        return inner
    if recompute == "norms" and not compiled:
        return partial(_call_without_norms, inner=inner)
    if recompute == "all-but-attention" and not compiled:
        return partial(_call_but_attention, inner=inner)
    if recompute == "full":
        return partial(_call, inner=inner, contexts=None)
    kept = KEPT[recompute]
    return partial(_call, inner=inner, contexts=partial(create_selective_checkpoint_contexts, partial(_policy, kept)))
