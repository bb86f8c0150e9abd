"""Dry run: the real training program on tensors without values in a simulated world.

Every rank that differs is run in its own process (one per pipeline stage: the others hold as much), as rank R of N in a
process group whose collectives do nothing. Time grows with what one rank computes, not with N.

Kernels also take memory inside an operation and return it before it ends. No tensor shows these workspaces, so rules
here count them. Sources for GPUs: torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd)
and mem_eff_attention/kernel_backward.h. Workspaces of matrix products are permanent: they are the planner's reserve.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from meshwright import compat
from meshwright.compat import torch_compile
from meshwright.compat.torch_compile import replace_compiler
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.dryrun.op_cache import cached_calls
from meshwright.observe.dryrun.rank_run import Watched, WatchedRank
from meshwright.observe.dryrun.storage_tracker import ROUNDING_BYTES, FakeWatch, StorageWatch
from meshwright.observe.program import TrainingProgram, extrapolate_step, probe_counts, without_values
from meshwright.observe.ranks import in_subprocesses
from meshwright.parallel import make_mesh
from meshwright.parallel.groups.group import Counts
from meshwright.planner.cost.stack import TUNING_BYTES
from meshwright.planner.step.predict import predict
from meshwright.spec import Plan
from meshwright.spec.layout.layout import check_ranks, pipeline_ranks, place_of
from meshwright.spec.memory.held import HeldParameter, list_held, takes
from meshwright.spec.rules.passes import compiles_blocks, is_lowered
from meshwright.spec.weights.boxes import Box, StateStorage
from meshwright.store.saver import Piece, piece
from meshwright.training.device import resident_peak_bytes

FP32_BYTES = 4
ROWS = 128
"""Multiple to which the flash kernel rounds the rows of queries."""
BLOCK = 64
"""Multiple to which the memory-efficient kernel rounds."""
MOST_LISTED_RANKS = 64
"""Most ranks whose lists are made. More take minutes, and then every rank has nearly an even share."""
_log = logging.getLogger("meshwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunCost:
    """Cost of the dry run of one rank: processor time, and memory of its process."""

    seconds: float
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Memory and traffic that a plan's program would have."""

    plan: Plan
    """The plan with the largest step of its batch ramp as every step."""
    device: str
    """Kind of device whose kernels and allocator are simulated: cuda or cpu."""
    ranks: tuple[WatchedRank, ...]
    run: dict[int, tuple[int, int]]
    """Micro-batches of the two simulated steps, by rank."""
    costs: dict[int, DryRunCost]
    notes: tuple[str, ...]

    @property
    def worst(self) -> WatchedRank:
        """The rank that needs most."""
        return max(self.ranks, key=lambda seen: seen.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the worst rank."""
        return self.worst.peak_bytes

    def traffic(self, rank: int) -> Counts:
        """Return (axis, collective) -> calls and bytes that a rank sends in a whole step."""
        seen = next(watched for watched in self.ranks if watched.rank == rank)
        layout, batch = self.plan.layout, self.plan.recipe.global_batch
        # Some traffic is per step and some per micro-batch: two steps of unequal size tell them apart.
        first, second = seen.sent
        counts, micro_batches = self.run[rank], layout.micro_batches(batch)
        totals = {}
        for key in second:
            calls = [extrapolate_step(first.get(key, (0, 0))[n], second[key][n], counts, micro_batches) for n in (0, 1)]
            totals[key] = calls[0], calls[1]
        return totals


def dry_run(
    plan: Plan,
    *,
    ranks: Sequence[int] = (),
    device: str = "",
    load: float = 1.0,
    whole: bool = False,
    processes: int = 0,
    limit_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DryRun:
    """Run the program of ranks of a plan on tensors without values.

    Raises PlanError when the plan cannot run or sizes of its model depend on values, and TooLong after `limit_s`.

    Args:
        ranks: Ranks to run. Empty = one per pipeline stage.
        load: Rows that a rank's experts get, relative to an even share.
        whole: Run every micro-batch of a step, instead of as many as it takes until nothing new happens.
        progress: Called with the number of ranks done and of all.
    """
    device = device or device_of(plan)
    plan.check()
    # The layout is resolved as on the target device: what auto means there, and kernels that run there.
    if device == "cuda":
        plan = predict(plan).settled
    if not compiles_blocks(plan.layout, plan.model, device, plan.recipe.fake_quantize):
        plan = replace(plan, layout=replace(plan.layout, compile="off"))
    if plan.cluster.device.is_gpu and not plan.cluster.device.runs_triton:
        plan = replace(plan, layout=replace(plan.layout, kernels="eager"))
    ramp, plan = plan.recipe.batch_ramp, replace(plan, recipe=plan.recipe.largest)
    ranks = tuple(ranks) or tuple(pipeline_ranks(plan.layout))
    check_ranks(plan.layout, ranks)
    every = plan.layout.micro_batches(plan.recipe.global_batch)
    counts = {rank: (every, every) if whole else probe_counts(plan, rank) for rank in ranks}
    # The longest ranks start first, so that no core waits for a late start at the end.
    longest_first = sorted(counts, key=lambda rank: -sum(counts[rank]))
    tasks = [(plan, rank, device, load, counts[rank]) for rank in longest_first]
    watched: dict[int, WatchedRank] = {}
    costs: dict[int, DryRunCost] = {}
    for number, (seen, cost) in in_subprocesses(_watch_timed, tasks, processes=processes, limit_s=limit_s):
        watched[longest_first[number]], costs[longest_first[number]] = seen, cost
        if progress is not None:
            progress(len(watched), len(counts))
    return DryRun(
        plan=plan,
        device=device,
        ranks=tuple(watched[rank] for rank in counts),
        run=counts,
        costs=costs,
        notes=tuple(_notes(plan, ramped=bool(ramp))),
    )


def device_of(plan: Plan) -> str:
    """Return cuda for a plan on a GPU that it describes or on a machine that has one, else cpu."""
    return "cuda" if plan.cluster.device.is_gpu or torch.cuda.is_available() else "cpu"


def watch_rank(plan: Plan, rank: int, device: str, load: float, counts: Sequence[int]) -> WatchedRank:
    """Run one rank in this process. A process can do this once, since torch keeps groups by name."""
    with compat.fake_world(rank, plan.layout.world), compat.fake_tensors() as fake, simulate_device(device):
        program = TrainingProgram(
            plan=plan, mesh=make_mesh(plan.layout), device=torch.device("cpu"), on_part=lambda part: None, routing=load,
            documents=plan.recipe.document_mask and plan.layout.cp == 1, acts_as=device,
            assigned=partial(assigned_of, plan, rank),
        )  # fmt: skip
        within = workspace_bytes if device == "cuda" else cpu_workspace_bytes
        watch = FakeWatch(ROUNDING_BYTES[device], cached_calls(fake), within)
        blocks = LoweredBlocks(fake, watch)
        lowers = device == "cuda" and is_lowered(plan.layout, plan.model, plan.recipe.fake_quantize)
        with without_values(), replace_compiler(blocks.compiled) if lowers else nullcontext():
            return Watched(program, watch).run(counts)


def _watch_timed(
    plan: Plan, rank: int, device: str, load: float, counts: tuple[int, int]
) -> tuple[WatchedRank, DryRunCost]:
    # Nothing is computed, so threads would only get in each other's way.
    torch.set_num_threads(1)
    watched = watch_rank(plan, rank, device, load, counts)
    return watched, DryRunCost(seconds=time.process_time(), resident_bytes=resident_peak_bytes())


def _notes(plan: Plan, *, ramped: bool) -> list[str]:
    notes = []
    if ramped:
        notes.append(f"of the batch ramp the largest step is run: {plan.recipe.global_batch} sequences")
    if plan.recipe.document_mask and plan.layout.cp > 1:
        notes.append("document masks over context-parallel ranks depend on the text and are not counted")
    if plan.model.moe is not None:
        notes.append("tokens are taken to go to experts evenly, or by the load that was given")
    return notes


def assigned_of(plan: Plan, rank: int, tensors: Mapping[str, Tensor]) -> set[str] | None:
    """Return the names of tensors that this rank writes among the ranks of its pipeline stage.

    Of identical pieces one rank writes each. torch assigns them over all ranks' lists, which exist only where ranks are
    real. The others' lists are made from their boxes (spec/memory/held.py), and torch's own planner assigns. The answer
    equals store.checkpoint.assigned. None = the stage has more than MOST_LISTED_RANKS ranks.

    Args:
        tensors: Tensors that this rank offers. Others of the stage offer the same names.
    """
    layout = plan.layout
    stage = place_of(layout, rank)["pp"]
    number = layout.world // layout.pp
    # The caller then counts an even share, which so many ranks nearly have.
    if number > MOST_LISTED_RANKS:
        return None
    planners = [DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False) for _ in range(number)]
    lists = []
    with compat.real_tensors():
        for other, planner in zip(range(stage * number, (stage + 1) * number), planners, strict=True):
            held_by_name = {holding.parameter.name: holding for holding in list_held(plan.model, layout, other)}
            planner.set_up_planner(_empty_pieces(tensors, held_by_name, plan.recipe.storage), is_coordinator=other == 0)
            lists.append(planner.create_local_plan())
        dealt, _ = planners[0].create_global_plan(lists)
    return {item.index.fqn for item in dealt[rank - stage * number].items}


def _empty_pieces(
    tensors: Mapping[str, Tensor], theirs: Mapping[str, HeldParameter], storage: StateStorage
) -> dict[str, Tensor]:
    """Return the same names and dtypes with another rank's boxes, without memory."""
    pieces = {}
    for name, tensor in tensors.items():
        box = _box_of(name, theirs, storage)
        cut = box is not None and (isinstance(tensor, Piece) or tuple(tensor.shape) == box.whole)
        sizes = box.sizes if cut and box is not None else tuple(tensor.shape)
        dtype = tensor.held.dtype if isinstance(tensor, Piece) else tensor.dtype
        pieces[name] = piece(torch.empty(sizes, dtype=dtype, device="meta"), box if cut else None)
    return pieces


def _box_of(name: str, theirs: Mapping[str, HeldParameter], storage: StateStorage) -> Box | None:
    """Return the box of a weight or an optimizer state, by its name in a checkpoint."""
    weight = theirs.get(name.removeprefix("model."))
    if weight is not None:
        return weight.owned_box
    _, state, parameter = (*name.split(".", 2), "", "")[:3]
    held = theirs.get(parameter)
    return storage.format_of(held.parameter).box(state, held.owned_box) if held else None


class LoweredBlocks:
    """Compiled blocks in a dry run: the code that torch.compile writes for a GPU, on tensors without values.

    Compiled code keeps and takes other memory than the blocks' operations one by one. Norms, activations and repeated
    keys are recomputed in the backward pass, which is one program with its own buffers. Blocks are lowered as on a GPU,
    their memory is taken as the code says, and their kernels are left out.
    """

    def __init__(self, fake: Any, watch: StorageWatch) -> None:
        self.fake, self.watch = fake, watch
        self.is_beyond = False
        """True once the compiler has refused a block."""

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Compile like torch.compile. Without gradients the call runs as it is: no such pass has the peak."""
        code = torch_compile.lower(call, self._watched, _TunedKernel)

        def run(*arguments: Any) -> Any:
            if not torch.is_grad_enabled() or self.is_beyond:
                return call(*arguments)
            try:
                with compat.real_tensors(), self.fake:
                    return code(*arguments)
            # Compilers fail in many ways. A run whose dry run is less exact is better than one that does not begin.
            except Exception as error:
                self.is_beyond = True
                _log.warning(
                    "meshwright: note: a dry run cannot lower these blocks and counts them uncompiled (%s)",
                    str(error).partition("\n")[0],
                )
                return call(*arguments)

        return run

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Enter the modes of a pass: forward, where the compiler left the watch, and backward."""
        with compat.real_tensors(), self.fake, self.watch:
            yield


class _TunedKernel:
    """A Triton kernel that tries several block sizes at its first call.

    Each try takes a buffer that empties the device's cache. Overwritten inputs are copied to the host where another
    copy of them would be the peak (torch 2.11 to 2.13, _inductor/runtime/triton_heuristics.py and benchmarking.py).
    """

    def __init__(self) -> None:
        self.is_tuned = False

    def __call__(self) -> None:
        if not self.is_tuned:
            self.is_tuned = True
            _empty_cache()


@takes("temporaries")
def _empty_cache() -> None:
    torch.empty(TUNING_BYTES, dtype=torch.uint8, device="cpu")


def workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a GPU allocates inside `operation` beyond its outputs. 0 = the operation has no rule."""
    rule = WORKSPACES.get(operation)
    return rule(*args[1:]) if rule else 0


def cpu_workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a CPU takes inside `operation`; its ranks communicate by Gloo."""
    rule = CPU_WORKSPACES.get(operation)
    return rule(*args) if rule else 0


def _gather(whole: Tensor, *_: Any) -> int:
    """Return the buffer of Gloo's gathers and scatters: the whole tensor (torch 2.13, ProcessGroupGloo.cpp)."""
    return whole.nbytes


def _scatter(part: Tensor, whole: Tensor, *_: Any) -> int:
    return whole.nbytes


def _add(total: Tensor, other: Any, *_: Any) -> int:
    """Return the copies that an in-place addition of two dtypes makes: the narrower one is widened whole."""
    if not isinstance(other, Tensor) or other.dim() == 0 or other.dtype == total.dtype:
        return 0
    wide = torch.promote_types(total.dtype, other.dtype)
    return sum(tensor.numel() * wide.itemsize for tensor in (total, other) if tensor.dtype != wide)


def _flash_backward(q: Tensor, k: Tensor, *_: Any) -> int:
    """Return the workspace of q (B, H, S, E) and k (B, K, T, E).

    It holds the gradient of q and one number per row in fp32. Where heads share keys it also holds gradients of keys
    and values for each head, which are summed afterwards.
    """
    batch, heads, rows, dim = q.shape
    rounded = batch * heads * _round_up(rows, ROWS)
    sums = rounded * (_round_up(dim, 32 if dim <= 128 else 64) + 1) * FP32_BYTES
    is_grouped = k.shape[1] != heads
    return sums + is_grouped * 2 * batch * k.shape[2] * heads * dim * q.element_size()


def _varlen_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, borders: Tensor | None, *_: Any) -> int:
    """Return the workspace of q (T, H, E) and k (T, K, E) of documents that begin at `borders` (N + 1,).

    ROWS rows are added for each document. Without borders, tensors are those of a dense batch: q (B, S, H, E),
    k (B, S', K, E).
    """
    if borders is None:
        return _flash_backward(q.transpose(1, 2), k.transpose(1, 2))
    total, heads, dim = q.shape
    rounded = heads * (total + ROWS * (len(borders) - 1))
    sums = rounded * (_round_up(dim, 32 if dim <= 128 else 64) + 1) * FP32_BYTES
    return sums + (k.shape[1] != heads) * 2 * len(k) * heads * dim * q.element_size()


def _efficient_backward(q: Tensor, k: Tensor, *_: Any) -> int:
    """Return the workspace of q (B, H, S, E): its fp32 gradient if it has 16 bits, and one number per row."""
    batch, heads, rows, dim = q.shape
    sums = _round_up(rows, BLOCK) * _round_up(dim, BLOCK) if q.element_size() < FP32_BYTES else 0
    return batch * heads * (sums + rows) * FP32_BYTES


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


WORKSPACES = {
    compat.attention_backward("flash"): _flash_backward,
    compat.attention_backward("efficient"): _efficient_backward,
    compat.varlen_backward(): _varlen_backward,
}


CPU_WORKSPACES: dict[Any, Callable[..., int]] = {
    compat.GATHER: _gather,
    compat.SCATTER: _scatter,
    torch.ops.aten.add_.Tensor: _add,
}
