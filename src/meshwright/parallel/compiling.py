"""Whether blocks are compiled, what that needs, and how a compiled block is called."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.compat import torch_compile
from meshwright.kernels.target import acts
from meshwright.kernels.weight_gradients import splits, traced
from meshwright.model.attention import AttentionMetadata
from meshwright.model.kv_cache import Past
from meshwright.model.moe import MoE, RoutedTokens, begin, finish
from meshwright.model.seams import BlockCall, compute
from meshwright.model.transformer import Block
from meshwright.parallel.agree import gather_objects
from meshwright.parallel.group import Group
from meshwright.parallel.recompute import block_call
from meshwright.spec.compiled_blocks import keeps_no_norms
from meshwright.spec.errors import PlanError
from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.layout import Layout, Recompute
from meshwright.spec.shape import ModelShape

VARIANTS = 64
"""Kinds of calls that a block may be compiled for: training or evaluation, packed or plain, windows, numbers of rows.
By torch's own limit of 8 the ninth would run uncompiled."""
KEEPS_BUFFERS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Of code that leaves gradients of weights for later: what waits for them is in buffers that Inductor would otherwise
write anew, since it sees no reader. Memory comes from the allocator instead, and a kernel that could overwrite what it
reads takes one buffer more."""
_log = logging.getLogger("meshwright")


def is_compiled(layout: Layout, device: torch.device) -> bool:
    """Whether blocks are compiled on a device; in a dry run, where something stands in for the compiler.

    PlanError where layout.compile=on and the machine lacks what that takes.
    """
    if layout.compile != "on":
        return False
    if acts():
        return torch_compile.stands_in()
    if missing := torch_compile.compile_tool_missing(device.type):
        raise PlanError(f"layout.compile=on lacks {missing} here: install it, or take layout.compile=off")
    return True


def kept_by_all(layout: Layout, shape: ModelShape) -> Recompute:
    """The policy of blocks that recompute nothing: none, but in a dry run in which nothing stands in for the compiler,
    and compiled ones make norms again by themselves (compat.torch_compile.keeping_less), norms."""
    stood_for = acts() and not torch_compile.stands_in()
    return "norms" if stood_for and keeps_no_norms(layout, shape, acts()) else "none"


def without_auto(layout: Layout, device: torch.device, world: Group) -> Layout:
    """The layout run plainly where it leaves that open: which way is the fastest, a plan alone knows."""
    if layout.compile == "auto" and device.type == "cuda" and not acts() and world.index == 0:
        _log.warning(
            "meshwright: note: blocks run uncompiled and outside CUDA graphs: layout.compile=auto and "
            "layout.cuda_graphs=auto are for a plan to choose (Prediction.settled)"
        )
    return layout.plain


def missing_anywhere(device: torch.device, world: Group) -> str:
    """What compiling lacks on the machine of some rank of `world`, all of which ask; empty where all have it."""
    missing = torch_compile.compile_tool_missing(device.type)
    everywhere = gather_objects(missing, world.process_group) if world.size > 1 else [missing]
    return next(filter(None, everywhere), "")


def compile_notes(layout: Layout, device: torch.device, shape: ModelShape) -> list[str]:
    """Why blocks of a shape are not compiled although that is asked for; empty where nothing is to say."""
    if not holds_codes(shape) or not is_compiled(layout, device):
        return []
    return [
        "blocks run uncompiled, which is slower: a matrix that is held as codes is restored in each product "
        "(layout.compile=off: no note)"
    ]


def prepare() -> None:
    """Raise torch's limit of kinds of calls, and say so where that is hit; no code of another CPU is taken."""
    torch_compile.keep_code_by_cpu()
    torch_compile.raise_recompile_limit(VARIANTS)
    torch_compile.when_recompile_limit_is_hit(_say_limit)


def compiled_call(recompute: str, *, apart: bool) -> BlockCall:
    """What calls the blocks of a model that is to be compiled.

    Blocks are compiled together with their recomputation: around compiled code nobody sees operations any more. Routed
    ones whose experts are left alone (`apart`) cannot be, since the compiler does not recompute a part that it must
    leave alone: their recomputation is around what is compiled of them. Of whole blocks norms and all-but-attention
    keep the results of products and of attention, or those of attention; of those others they are `none` and `full`.
    With a cache every token has another length and would be compiled anew: generation stays as it is.
    """
    around = {"norms": "none", "all-but-attention": "full"}.get(recompute, recompute)
    as_one = _compiled(block_call(recompute, compiled=True))
    in_parts = block_call(around, _around_experts()) if apart else as_one

    def run(block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None) -> tuple[Tensor, Tensor | None]:
        call = compute if cache is not None else in_parts if block.routed else as_one
        found: tuple[Tensor, Tensor | None] = call(block, x, metadata, cache)
        return found

    return run


def _around_experts() -> BlockCall:
    """A routed block as a graph before its experts and one behind them, and two of shared experts beside rows that
    travel. The experts take runs of rows whose lengths would become constants of the code, and what ZeRO gathers for
    them is gathered by a hook: neither is for the compiler. Cut by hand: where the compiler finds a part that it must
    leave alone in a module inside of a block, it cuts around that module, too."""
    before, behind = _compiled(_before_experts), _compiled(_behind_experts)
    halves = _compiled(begin), _compiled(finish)

    def run(
        block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x, routed, rows = before(block, x, metadata)
        received, shared = cast(MoE, block.mlp).visit(routed, rows, halves)
        found: tuple[Tensor, Tensor | None] = behind(block, x, routed, received, shared, metadata.padding)
        return found

    return run


def _before_experts(block: Block, x: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, RoutedTokens, list[Tensor]]:
    normed, x = block.attend(x, metadata)
    return x, *cast(MoE, block.mlp).route(normed)


def _behind_experts(
    block: Block, x: Tensor, routed: RoutedTokens, received: Tensor, shared: Tensor | None, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, balance = cast(MoE, block.mlp).join(routed, received, shared, padding)
    return x + block.drop(out), balance


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, whose first argument is a module, as compiled code: of backward passes that are whole, and of those
    that are split."""
    once, in_two = torch_compile.compiled(call), torch_compile.compiled(call, options=KEEPS_BUFFERS)

    def run(module: nn.Module, *given: Any) -> Any:
        with torch_compile.keeping_less():
            if not splits():
                return once(module, *given)
            with traced(module.parameters()):
                return in_two(module, *given)

    return run


def _say_limit() -> None:
    _log.warning(
        "meshwright: note: a block was compiled for %d kinds of calls, and every further kind runs uncompiled: slower, "
        "with the same results. TORCH_LOGS=recompiles names what differs.",
        VARIANTS,
    )
