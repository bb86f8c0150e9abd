"""Private names of fully_shard and of what runs beside it, each with its reason."""

from typing import Any

import torch


def let_selective_recomputation_pass_hooks() -> None:
    """torch 2.13's selective checkpoint wants every operation of the first pass again in the second, also the
    profiler's marks that FSDP's hooks leave in the first only. Its list of operations to pass over is public, their
    names are not.
    """
    from torch.utils import checkpoint

    ignored = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    for name, overload in (("_record_function_enter_new", "default"), ("_record_function_exit", "_RecordFunction")):
        operation = getattr(getattr(torch.ops.profiler, name, None), overload, None)
        if ignored is not None and operation is not None:
            ignored.add(operation)


def fsdp_keep_reduce_dtype(modules: list[Any]) -> None:
    """Let FSDP's shards of gradients keep the dtype in which they were reduced, for modules with memory, roots first.

    FSDP casts every reduced gradient to the dtype of the shard before it adds it to the micro-batches before, and takes
    that dtype from `_orig_dtype` of a group (None = no cast), which is set when the first pass begins: made now. Where
    these names do not do this any more, the first reduction fails: a gradient is not of its parameter's `grad_dtype`.
    """
    for module in modules:
        _fsdp_state(module)._lazy_init()
    for module in modules:
        for group in _fsdp_groups(module):
            group._orig_dtype = None


def _fsdp_state(module: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]  # an attribute that a decorator sets


def _fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of a module: torch has had one or none as well as a list of them."""
    state = _fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_drop_gradients(modules: list[Any]) -> None:
    """Forget gradients that modules hold but have not reduced. FSDP keeps them on its own records of parameters, which
    have no public name."""
    for module in modules:
        for group in _fsdp_groups(module):
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None


def fsdp_post_backward(modules: list[Any]) -> None:
    """What FSDP does at the end of a backward pass, for modules in the order of the forward pass, roots first.

    torch's own pipeline runtime calls the same private names, since a gradient may come later than the pass that FSDP
    hangs on; there is no public way to ask for the reduction.
    """
    for module in reversed(modules):
        for group in _fsdp_groups(module):
            group.post_backward()
    for module in modules:
        state = _fsdp_state(module)
        if state._is_root:
            state._root_post_backward_final_callback()
