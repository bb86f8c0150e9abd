"""torch.compile for blocks: when they are compiled, what that needs, and how a compiled block is called."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.compat import torch_compile
from meshwright.kernels.chooser import simulated_kind
from meshwright.kernels.linear.weight_gradients import splits, traced
from meshwright.model.attention import AttentionMetadata, Past
from meshwright.model.feed_forward import MoE, RoutedTokens, begin, finish
from meshwright.model.seams import BlockCall, compute
from meshwright.model.transformer import MLP_SITE, Block
from meshwright.parallel.blocks.recompute import block_call
from meshwright.parallel.groups.group import Group, gather_objects
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout, Recompute
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.rules.passes import holds_codes, keeps_no_norms

VARIANTS = 64
"""Kinds of calls that a block may be compiled for: training, evaluation, packed, plain, windows, numbers of rows.
With torch's default limit of 8, the ninth kind would run uncompiled.
"""
KEEPS_BUFFERS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Inductor's options for code that leaves gradients of weights for later.
The waiting inputs are in buffers that Inductor would otherwise reuse, since it sees no reader. Now memory comes from
the allocator instead, and a kernel that could overwrite its input takes one buffer more.
"""
_log = logging.getLogger("meshwright")


def is_compiled(layout: Layout, device: torch.device) -> bool:
    """Return whether blocks are compiled on a device. In a dry run: whether something stands in for the compiler.

    Raises PlanError when layout.compile=on and the machine lacks a tool that it needs.
    """
    if layout.compile != "on":
        return False
    if simulated_kind():
        return torch_compile.is_compiler_replaced()
    if missing := torch_compile.compile_tool_missing(device.type):
        raise PlanError(f"layout.compile=on lacks {missing} here: install it, or take layout.compile=off")
    return True


def unrecomputed_policy(layout: Layout, shape: ModelShape) -> Recompute:
    """Return the recomputation policy of blocks that the layout does not recompute: usually `none`.

    It is `norms` in a dry run without a stand-in for the compiler, when compiled blocks would recompute norms by
    themselves (compat.torch_compile.let_recompute_norms).
    """
    stood_for = simulated_kind() and not torch_compile.is_compiler_replaced()
    return "norms" if stood_for and keeps_no_norms(layout, shape, simulated_kind()) else "none"


def resolve_auto(layout: Layout, device: torch.device, world: Group) -> Layout:
    """Return the layout with compile=auto and cuda_graphs=auto off: only a plan knows which is faster."""
    if layout.compile == "auto" and device.type == "cuda" and not simulated_kind() and world.index == 0:
        _log.warning(
            "meshwright: note: blocks run uncompiled and outside CUDA graphs: layout.compile=auto and "
            "layout.cuda_graphs=auto are for a plan to choose (Prediction.settled)"
        )
    return layout.plain


def find_missing_tool(device: torch.device, world: Group) -> str:
    """Return the tool for compiling that some rank's machine lacks. Empty = none. Every rank calls this."""
    missing = torch_compile.compile_tool_missing(device.type)
    everywhere = gather_objects(missing, world.process_group) if world.size > 1 else [missing]
    return next(filter(None, everywhere), "")


def compile_notes(layout: Layout, device: torch.device, shape: ModelShape) -> list[str]:
    """Return the reason why blocks are not compiled although the layout asks for it. Empty = no reason."""
    if not holds_codes(shape) or not is_compiled(layout, device):
        return []
    return [
        "blocks run uncompiled, which is slower: a matrix that is held as codes is restored in each product "
        "(layout.compile=off: no note)"
    ]


def prepare() -> None:
    """Raise torch's limit of variants, with a warning once it is hit, and separate cached code by CPU."""
    torch_compile.keep_code_by_cpu()
    torch_compile.raise_recompile_limit(VARIANTS)
    torch_compile.when_recompile_limit_is_hit(_warn_of_limit)


def compile_call(recompute: str, *, apart: bool) -> BlockCall:
    """Return the function that calls the blocks of a model that is to be compiled.

    Blocks are compiled together with their recomputation: around compiled code no hook sees single operations. Routed
    blocks whose experts stay uncompiled (`apart`) are an exception, since the compiler cannot recompute a part that it
    skips. Their recomputation is around the compiled parts: `none` instead of norms, `full` instead of
    all-but-attention. With a cache every token has another length and would be compiled anew, so generation is not
    compiled.
    """
    around = {"norms": "none", "all-but-attention": "full"}.get(recompute, recompute)
    as_one = _compile(block_call(recompute, compiled=True))
    in_parts = block_call(around, _around_experts()) if apart else as_one

    def run(block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None) -> tuple[Tensor, Tensor | None]:
        call = compute if cache is not None else in_parts if block.routed else as_one
        output: tuple[Tensor, Tensor | None] = call(block, x, metadata, cache)
        return output

    return run


def _around_experts() -> BlockCall:
    """Compile a routed block as one graph before its experts and one behind them.

    Shared experts are two more graphs, which run while rows travel. Experts are not for the compiler: the lengths of
    their runs would become constants of the code, and ZeRO gathers their parameters in a hook. The cut is made by hand,
    because the compiler, when it must skip a part of a module inside a block, also skips that module.
    """
    before, behind = _compile(_before_experts), _compile(_behind_experts)
    halves = _compile(begin), _compile(finish)

    def run(
        block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x, routed, rows = before(block, x, metadata)
        received, shared = cast(MoE, block.mlp).visit(routed, rows, halves)
        output: tuple[Tensor, Tensor | None] = behind(block, x, routed, received, shared, metadata)
        return output

    return run


def _before_experts(block: Block, x: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, RoutedTokens, list[Tensor]]:
    normed, x = block.attend(x, metadata)
    keys = metadata.token_keys if block.adapters_drop else None
    return x, *cast(MoE, block.mlp).route(normed, keys)


def _behind_experts(
    block: Block, x: Tensor, routed: RoutedTokens, received: Tensor, shared: Tensor | None, metadata: AttentionMetadata
) -> tuple[Tensor, Tensor]:
    out, balance = cast(MoE, block.mlp).join(routed, received, shared, metadata.padding)
    return x + block.drop(out, metadata, MLP_SITE), balance


def _compile(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a module twice: for whole backward passes, and for split ones (KEEPS_BUFFERS)."""
    once, in_two = torch_compile.compile_function(call), torch_compile.compile_function(call, options=KEEPS_BUFFERS)

    def run(module: nn.Module, *arguments: Any) -> Any:
        with torch_compile.let_recompute_norms():
            if not splits():
                return once(module, *arguments)
            with traced(module.parameters()):
                return in_two(module, *arguments)

    return run


def _warn_of_limit() -> None:
    _log.warning(
        "meshwright: note: a block was compiled for %d kinds of calls, and every further kind runs uncompiled: slower, "
        "with the same results. TORCH_LOGS=recompiles names what differs.",
        VARIANTS,
    )
