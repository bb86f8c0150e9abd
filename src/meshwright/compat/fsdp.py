"""Private names of fully_shard and related code, each with its reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def let_selective_recomputation_pass_hooks() -> None:
    """Let selective checkpointing ignore the profiler marks of FSDP's hooks.

    torch 2.13's selective checkpoint expects every operation of the first pass again in the second, but FSDP's hooks
    leave profiler marks in the first only. The list of ignored operations is public, their names are not.
    """
    from torch.utils import checkpoint

    ignored = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    for name, overload in (("_record_function_enter_new", "default"), ("_record_function_exit", "_RecordFunction")):
        operation = getattr(getattr(torch.ops.profiler, name, None), overload, None)
        if ignored is not None and operation is not None:
            ignored.add(operation)


def fsdp_keep_reduce_dtype(modules: list[Any]) -> None:
    """Let FSDP keep sharded gradients in the dtype of their reduction, for modules with memory, roots first.

    FSDP casts every reduced gradient to the dtype of the shard before accumulating it. It takes that dtype from a
    group's `_orig_dtype` (None = no cast), which is set before the first pass; here it is set now. If these names stop
    working, the first reduction fails: a gradient does not have its parameter's `grad_dtype`.
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
    """Return the parameter groups of a module, stored by torch as a list, one group, or none."""
    state = _fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_drop_gradients(modules: list[Any]) -> None:
    """Discard unreduced gradients, which FSDP stores in its own records without a public name."""
    for module in modules:
        for group in _fsdp_groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def fsdp_post_backward(modules: list[Any]) -> None:
    """Run FSDP's end of a backward pass for modules in forward order, roots first.

    torch's pipeline runtime calls the same private names, since a gradient may arrive after the pass that FSDP hooks
    into. The reduction has no public trigger.
    """
    # As a backward pass ends: the last unit first, the root at the end.
    for module in reversed(modules):
        for group in _fsdp_groups(module):
            group.post_backward()
    for module in modules:
        state = _fsdp_state(module)
        if state._is_root:
            state._root_post_backward_final_callback()


@contextmanager
def joined_streams(device: torch.device) -> Iterator[None]:
    """Run what the current stream is given inside only while the default stream computes nothing.

    fully_shard starts its collectives on streams of its own.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    yield
    join_stream(device)


def join_stream(device: torch.device) -> None:
    """Have the default stream wait for the current one."""
    if device.type == "cuda":
        torch.cuda.default_stream(device).wait_stream(torch.cuda.current_stream(device))
