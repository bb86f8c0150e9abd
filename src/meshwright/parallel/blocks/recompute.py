"""Activation recomputation: keep less in the forward pass, compute it again in the backward pass.

    full                keep only a layer's input (Chen et al. 2016, arXiv:1604.06174)
    all-but-attention   keep also the inputs and outputs of the attention core, with its log-sum-exp
    selective           recompute the attention core alone (Korthikanti et al. 2022, arXiv:2205.05198, section 5),
                        so that its S x S weights are not kept; kernels that never store these save nothing
    norms               keep everything except the outputs of norms

All repeat the same operations, so loss and gradients keep every bit.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.compat.fakes import storage_key
from meshwright.kernels.linear.weight_gradients import same_split
from meshwright.model.attention import AttentionMetadata, Past
from meshwright.model.layers import LayerNorm, RMSNorm
from meshwright.model.seams import BlockCall, compute, same
from meshwright.model.transformer import Block


class SavedTensorHooks(NamedTuple):
    """Hooks for tensors that autograd saves, the arguments of `saved_tensors_hooks`.

    torch calls only the innermost pair. Here a pair that handles some tensors passes the others to the pair around it:
    recomputation handles the outputs of norms, offload moves the rest.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


ALIASES = SavedTensorHooks(Tensor.detach, lambda packed: packed)
"""Hooks that save an alias. A node that saved its own output would never be freed without a backward pass."""
_around: ContextVar[SavedTensorHooks] = ContextVar("around", default=ALIASES)


def hooks_around() -> SavedTensorHooks:
    """Return the hooks of the innermost `save_with` around this code."""
    return _around.get()


@contextmanager
def save_with(hooks: SavedTensorHooks) -> Iterator[None]:
    """Have autograd save tensors by these hooks inside."""
    token = _around.set(hooks)
    try:
        with saved_tensors_hooks(*hooks):
            yield
    finally:
        _around.reset(token)


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
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
) | {getattr(torch.ops.meshwright, name).default for name in ("varlen_attention", "context_attention")}
"""Attention in compiled code: it has no seams, and a policy sees only operators."""

EXCHANGES = frozenset({torch.ops.meshwright.enter.default, torch.ops.meshwright.leave.default})


def _policy(operations: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in operations else CheckpointPolicy.PREFER_RECOMPUTE


def _call(
    block: Block,
    x: Tensor,
    metadata: AttentionMetadata,
    cache: Past | None,
    *,
    inner: BlockCall,
    contexts: Callable[[], tuple[Any, Any]] | None,
) -> tuple[Tensor, Tensor | None]:
    # Without a backward pass there is nothing to compute again.
    if not torch.is_grad_enabled() or cache is not None:
        return inner(block, x, metadata, cache)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    output: tuple[Tensor, Tensor | None] = checkpoint(
        same_split(inner),
        block,
        x,
        metadata,
        None,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing in a block draws from a generator, dropout included
        **options,
    )
    return output


class _NormOutput:
    """Output of a norm, for a tensor that a later operation wanted to save.

    The norm's input `x` is kept until the block has saved the first such tensor. From then on, `around` holds it
    packed.
    """

    def __init__(self, norm: nn.Module, x: Tensor, output: Tensor, around: SavedTensorHooks) -> None:
        self.norm, self.output, self.version, self.around = norm, ref(output), output._version, around
        self.x: Tensor | None = x
        self.packed: Any = None
        self.readers = 0
        self.again: Tensor | None = None

    def is_there(self) -> bool:
        """Return whether the norm's own tensor lives and has not been overwritten. Then its address is unique."""
        output = self.output()
        return output is not None and output._version == self.version

    def pack(self) -> None:
        """Count one more reader."""
        if self.x is not None:
            self.packed, self.x = self.around.pack(self.x), None
        self.readers += 1

    @torch.no_grad()
    def compute_again(self) -> Tensor:
        """Return the output, computed once for all of its readers. The last one frees it."""
        output = self.again
        if output is None:
            output = self.norm.forward(self.around.unpack(self.packed))
        self.readers -= 1
        self.again = output if self.readers > 0 else None
        return output


class _Reading(NamedTuple):
    """Stand-in for a norm's output in a node of the graph."""

    norm: _NormOutput
    shape: torch.Size


class _Norms:
    """The saved tensors of one call of a block: outputs of norms are computed again instead."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[Any, ...], _NormOutput] = {}
        self.around = hooks_around()

    def mark(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record an output of a norm: a forward hook."""
        if output.is_contiguous():
            self.outputs[_address(output)] = _NormOutput(norm, inputs[0].detach(), output, self.around)

    def pack(self, saved: Tensor) -> Any:
        """Pack a norm's output as a reference to the norm. Other tensors go to the hooks around."""
        output = self.outputs.get(_address(saved)) if saved.is_contiguous() else None
        if output is None or not output.is_there():
            return self.around.pack(saved)
        output.pack()
        return _Reading(output, saved.shape)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor, or compute the norm once more."""
        return (
            packed.norm.compute_again().view(packed.shape)
            if isinstance(packed, _Reading)
            else self.around.unpack(packed)
        )


def _address(x: Tensor) -> tuple[Any, ...]:
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
        with save_with(SavedTensorHooks(norms.pack, norms.unpack)):
            return inner(block, x, metadata, cache)
    finally:
        for handle in handles:
            handle.remove()
        norms.outputs.clear()  # packed tensors hold their own reference


class _AttentionOnce:
    """One call of a block and its repetitions, which reuse the attention output of the first call."""

    def __init__(self, inner: BlockCall) -> None:
        self.inner = inner
        self.output: Tensor | None = None
        self.learns = False
        """True if the output needs a gradient."""

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Run the inner call."""
        before = _current_call.set(self)
        try:
            return self.inner(*arguments)
        finally:
            _current_call.reset(before)

    def attend_once(self, attend: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Return the attention of the first call, and keep what its backward pass needs."""
        if self.output is None:
            # The hooks of checkpoint around this call would drop what attention saves; these keep it.
            with saved_tensors_hooks(torch.Tensor.detach, same):
                output = attend(*arguments, **options)
            self.output, self.learns = output.detach(), output.requires_grad
            return output
        return self.output.detach().requires_grad_(self.learns)


_current_call: ContextVar[_AttentionOnce | None] = ContextVar("current_call", default=None)


def keep_attention(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap kernels.attend for the policy all-but-attention."""

    def attend_once(*arguments: Any, **options: Any) -> Tensor:
        call = _current_call.get()
        return attend(*arguments, **options) if call is None else call.attend_once(attend, *arguments, **options)

    return attend_once


def _call_but_attention(block: Block, *arguments: Any, inner: BlockCall) -> tuple[Tensor, Tensor | None]:
    return _call(block, *arguments, inner=_AttentionOnce(inner), contexts=None)


def choose_call(blocks: Collection[nn.Module], call: BlockCall, others: BlockCall) -> BlockCall:
    """Return a call that runs some blocks by `call` and the rest by `others`."""
    chosen = frozenset(blocks)

    def run(block: Block, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        return (call if block in chosen else others)(block, *arguments)

    return run


def recompute_attention(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap kernels.attend for the policy selective: only the inputs of the core are kept."""

    def attend_again(*arguments: Any, **options: Any) -> Tensor:
        core = partial(attend, **options)
        if not torch.is_grad_enabled():
            return core(*arguments)
        out: Tensor = checkpoint(core, *arguments, use_reentrant=False, preserve_rng_state=False)
        return out

    return attend_again


KEPT = {
    "norms": MATRIX_PRODUCTS | ATTENTION_CORES | EXCHANGES,
    "all-but-attention": ATTENTION_CORES,
}
"""Operators whose outputs a policy keeps, for policies that are defined by operators."""


def block_call(recompute: str, inner: BlockCall = compute, *, compiled: bool = False) -> BlockCall:
    """Return the function that runs a block under a policy, a word of layout.recompute.

    `inner` is recomputed; hooks on the block stay outside of it. `compiled`: the function is going to be compiled.
    selective works inside attention.
    """
    if recompute in ("none", "selective"):
        return inner
    if recompute == "norms" and not compiled:
        return partial(_call_without_norms, inner=inner)
    if recompute == "all-but-attention" and not compiled:
        return partial(_call_but_attention, inner=inner)
    if recompute == "full":
        return partial(_call, inner=inner, contexts=None)
    policy = partial(_policy, KEPT[recompute])
    return partial(_call, inner=inner, contexts=partial(create_selective_checkpoint_contexts, policy))
