"""Activation recomputation: keep less in the forward pass, make it again in the backward pass.

full: keep a layer's input only (Chen et al. 2016, arXiv:1604.06174). selective: by operation (Korthikanti et al. 2022,
arXiv:2205.05198): keep what is costly to make, the results of products with weights; make the attention core, the
norms, the rotation and the activation again. Both repeat the same operations, so loss and gradients keep every bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.kernels.linear import same_split
from meshwright.model.attention import Sight
from meshwright.model.kv_cache import Past
from meshwright.model.seams import BlockCall, compute
from meshwright.model.transformer import Block
from meshwright.parallel import column_parallel as column_parallel  # registers its operator

MATRIX_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "linear", "_grouped_mm")
    if hasattr(torch.ops.aten, name)
) | {torch.ops.meshwright.columns.default}
"""Products with weights. Batched ones (bmm) are those of the attention core: S x S, what is to be made again."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in MATRIX_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _call(
    block: Block,
    x: Tensor,
    sight: Sight,
    cache: Past | None,
    *,
    inner: BlockCall,
    contexts: Callable[[], tuple[Any, Any]] | None,
) -> tuple[Tensor, Tensor | None]:
    if not torch.is_grad_enabled() or cache is not None:
        return inner(block, x, sight, cache)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    keep_random_state = bool(block.dropout) and block.training
    result: tuple[Tensor, Tensor | None] = checkpoint(
        same_split(inner), block, x, sight, None, use_reentrant=False, preserve_rng_state=keep_random_state, **options
    )
    return result


def block_call(recompute: str, inner: BlockCall = compute) -> BlockCall:
    """The function that runs a block under a policy: none, selective or full. `inner` is what is made again; hooks on
    the block stay outside of it."""
    if recompute == "none":
        return inner
    if recompute == "full":
        return partial(_call, inner=inner, contexts=None)
    return partial(_call, inner=inner, contexts=partial(create_selective_checkpoint_contexts, _policy))
