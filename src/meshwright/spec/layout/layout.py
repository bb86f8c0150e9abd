"""Layout: all settings that must not change the loss curve, such as degrees, micro-batch, ZeRO and recomputation.

It also says where ranks stand: their coordinates, groups and stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args, get_origin, get_type_hints

from meshwright.spec.errors import IllegalLayout, PlanError, argument
from meshwright.spec.layout.schedule import SPLIT, SPLIT_ALWAYS, ScheduleName, ranges, stage_layers, stages_of_ranks
from meshwright.spec.model.shape import MoEShape

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the outermost to the innermost: tp ranks are neighbours. ep is carved out of dp_shard x cp x tp."""


Recompute = Literal["none", "norms", "selective", "all-but-attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
OFFLOADED: tuple[Recompute, ...] = ("none", "norms", "full")
"""Policies under which all that a block stores can move to host memory. The others keep a part on the device."""


PIECED = 2**25
"""Elements of hidden states from which sending one half takes longer than starting another collective."""
NEAR = 8
"""Ranks of one node. Between nodes, starting a collective takes longer."""
EXPERT_PIECE = 2**24
"""Fewest elements of rows per piece that a rank sends to experts. Smaller pieces cost more to start than they hide."""
EXPERT_PIECES = (4, 2, 1)
"""Possible numbers of pieces if the layout gives none. Between nodes two hide as much as more: sending takes longer
than the experts."""
NEAR_ROWS, FAR_ROWS = 0.4, 0.04
"""Rows that an expert receives from other ranks, relative to its inner width, from which pieces pay within a node and
between nodes. The gradients of the pieces are combined by an extra pass over memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Distribution of a step over devices. Every degree is declared here. 1 = not used."""

    dp_replicate: int = 1
    """Data parallel: replicas that hold the same shards; auto = as many as the number of processes allows."""
    dp_shard: int = 1
    """Data parallel: ranks that share one replica (ZeRO, FSDP); auto = as many as the number of processes allows."""
    tp: int = 1
    """Tensor parallel: ranks that share every matrix."""
    cp: int = 1
    """Context parallel: ranks that share every sequence."""
    pp: int = 1
    """Pipeline parallel: ranks that share the layers."""
    ep: int = 1
    """Expert parallel: ranks that share the experts; carved out of dp_shard x cp x tp."""
    vp: int = 1
    """Virtual stages per pipeline rank."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over dp_shard: 1 shards optimizer states, 2 also gradients, 3 also parameters (FSDP)."""
    sp: bool = False
    """Sequence parallel: norms and dropout between TP blocks are sharded along the sequence."""
    tp_chunks: int = 0
    """Pieces of a sequence that pass the products of TP blocks one by one, so that the collectives of one piece overlap
    with the products of the next; 0 = 2 on a GPU, from 2**25 elements of hidden states on and for at most 8 ranks; else
    1."""
    ep_chunks: int = 0
    """Pieces of the tokens that travel to the experts of other ranks and back. Each is for an equal part of a rank's
    experts, so that one computes while the next travels. 0 = on a GPU 4 for at most 8 ranks and 2 for more, of at least
    2**24 elements each; else 1. It is also 1 where experts have few rows or the schedule splits backward passes."""
    context: Literal["ring", "all-gather"] = "ring"
    """Exchange of keys among context-parallel ranks: passed around a ring while computing, or gathered first."""
    context_split: Literal["zigzag", "striped", "chunks"] = "zigzag"
    """Positions of a context-parallel rank: a chunk from the front and one from the back (zigzag), every cp-th one
    (striped), or one chunk. The first two give causal attention even work."""
    schedule: ScheduleName = "1f1b"
    """Order of the pipeline's forward and backward passes."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage, from the embedding to the head; [] = even, embedding and head counting as a layer
    each."""
    micro_batch: int = 0
    """Sequences of one forward pass on one rank; 0 = the rank's whole share of the global batch."""
    recompute: Recompute = "none"
    """Activations that the backward pass recomputes. norms: outputs of norms; selective: the attention core if it
    stores its S x S weights (kernels=reference), else nothing; all-but-attention: all but the attention core; full: all
    but the inputs of layers."""
    recompute_layers: int = 0
    """Layers of each pipeline stage that recompute, counted from its first; the others store everything. 0 = all."""
    offload: Literal["off", "activations"] = "off"
    """activations: what a block stores for its backward pass is held in host memory, except for each stage's last
    block. With recompute none, norms and full."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of each block: auto = on a GPU, where the planner predicts a faster run, or where nothing else
    fits."""
    cuda_graphs: Literal["auto", "off", "on"] = "auto"
    """on: a micro-batch's forward and backward pass is captured as a CUDA graph and launched in one call, for models
    whose kernels are shorter than their launches. On GPUs with data parallelism alone (zero=0). auto = where the
    planner predicts steps at least a twentieth faster."""
    kernels: Literal["auto", "eager", "triton", "reference"] = "auto"
    """auto = Triton's where they are better, on a GPU; eager = torch's own operations; triton = Triton's wherever they
    can run; reference = slow plain kernels, for comparison."""
    overlap: Literal["on", "off"] = "on"
    """off, to study what overlap hides: each collective ends before other work continues, and gradients of replicas are
    summed after the backward pass. Same numbers, to the bit. Transfers between pipeline stages stay as they are."""
    saving: Literal["auto", "async", "sync"] = "auto"
    """async: a checkpoint is copied to host memory, then written while training continues; auto = on a GPU only."""

    def __post_init__(self) -> None:
        for field in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp"):
            if getattr(self, field) < 1:
                raise IllegalLayout(f"layout.{field}={getattr(self, field)} must be at least 1")
        if any(number < 1 for number in self.stages):
            raise IllegalLayout(f"layout.stages={list(self.stages)}: each stage has at least 1 layer")
        if self.tp_chunks < 0:
            raise IllegalLayout(f"layout.tp_chunks={self.tp_chunks} must be 0 (chosen by the sequence) or more")
        if self.ep_chunks < 0:
            raise IllegalLayout(f"layout.ep_chunks={self.ep_chunks} must be 0 (chosen by the rows) or more")
        if self.micro_batch < 0:
            raise IllegalLayout(f"layout.micro_batch={self.micro_batch} must be 0 (all at once) or more")
        if self.recompute_layers < 0:
            raise IllegalLayout(f"layout.recompute_layers={self.recompute_layers} must be 0 (all) or more")
        for field, words in WORDS.items():
            # Checked here, since a plan may also be built in Python, without the types of a plan file.
            if getattr(self, field) not in words:
                check_word(field, getattr(self, field))

    @property
    def dp(self) -> int:
        """Data-parallel degree: the number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Number of ranks. ep is not a factor: it borrows ranks from dp_shard x cp x tp."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def policies(self) -> tuple[Recompute, ...]:
        """Recompute policies that this layout may have."""
        return RECOMPUTE if self.offload == "off" else OFFLOADED

    @property
    def writes_scores(self) -> bool:
        """This package's attention stores its S x S weights: the reference kernels without context parallelism."""
        return self.kernels == "reference" and self.cp == 1

    @property
    def acting_recompute(self) -> Recompute:
        """Policy in effect in this package's engine: `selective` has nothing to drop if no S x S weights are stored."""
        return "none" if self.recompute == "selective" and not self.writes_scores else self.recompute

    def recomputed(self, layers: int) -> int:
        """Return the number of layers that recompute in a stage of `layers`, counted from its first."""
        if self.recompute == "none":
            return 0
        return min(layers, self.recompute_layers or layers)

    def compiles(self, device: str) -> bool:
        """Return whether blocks are compiled on a kind of device (cpu, cuda).

        auto belongs to a search, which tries the variant that stores least (planner/step/prediction.py). An engine
        treats it as given here.
        """
        return self.compile == "on" or (self.compile == "auto" and device == "cuda")

    @property
    def plain(self) -> "Layout":
        """The same layout with neither compiled blocks nor graphs if it leaves them open."""
        compiled = "off" if self.compile == "auto" else self.compile
        return replace(self, compile=compiled, cuda_graphs="off" if self.cuda_graphs == "auto" else self.cuda_graphs)

    def saves_behind(self, device: str) -> bool:
        """Return whether a thread writes the checkpoints on a kind of device (cpu, cuda).

        On a CPU the copy would take memory and the write would take cores from training, so it must be asked for.
        """
        return self.saving == "async" or (self.saving == "auto" and device == "cuda")

    def micro_batch_of(self, global_batch: int) -> int:
        """Return the number of sequences in a rank's forward pass, in a step of `global_batch`. The field caps it."""
        per_rank = global_batch // self.dp
        return min(self.micro_batch, per_rank) if self.micro_batch else per_rank

    def micro_batches(self, global_batch: int) -> int:
        """Return the number of forward passes of a rank in a step. Raises IllegalLayout if it is uneven."""
        per_rank = global_batch // self.dp
        size = self.micro_batch_of(global_batch)
        # Fewer sequences than readers leave a rank without any: size is 0.
        if size * self.dp == 0 or per_rank * self.dp != global_batch or per_rank % size:
            unit = max(1, self.micro_batch) * self.dp
            raise IllegalLayout(
                f"recipe.global_batch={global_batch} is not micro_batch={max(1, self.micro_batch)} x accumulation x "
                f"dp={self.dp} for any whole accumulation: take recipe.global_batch="
                f"{max(1, round(global_batch / unit)) * unit}"
            )
        return per_rank // size

    def even_micro_batches(self, global_batch: int) -> int:
        """Return the same as `micro_batches`, or 0 when a rank's sequences cannot be cut evenly."""
        per_rank, size = global_batch // self.dp, self.micro_batch_of(global_batch)
        return 0 if not size or per_rank % size else per_rank // size

    def tp_pieces(self, positions: int, hidden: int, device: str) -> int:
        """Return the number of equal pieces in which sequences pass tensor-parallel products. sp shares each piece."""
        if self.tp == 1:
            return 1
        # Two pieces hide a collective behind products only where sending takes longer than starting it.
        pieces = self.tp_chunks or (2 if device == "cuda" and positions * hidden >= PIECED and self.tp <= NEAR else 1)
        return 1 if positions % (pieces * (self.tp if self.sp else 1)) else pieces

    @property
    def splits_backward(self) -> bool:
        """Backward passes leave the gradients of weights for later."""
        return self.pp > 1 and self.schedule in SPLIT

    @property
    def splits_every_backward(self) -> bool:
        """All backward passes leave the gradients of weights for later, outside of compiled code."""
        return self.pp > 1 and self.schedule in SPLIT_ALWAYS

    @property
    def keeps_passes_local(self) -> bool:
        """A rank's passes need no other rank."""
        return self.tp == self.cp == self.ep == self.pp == 1

    @property
    def sums_gradients(self) -> bool:
        """Other ranks have gradients to be summed with a rank's."""
        return self.dp * self.cp > 1

    @property
    def reduces_at_once(self) -> bool:
        """Gradients of each micro-batch are reduced by themselves: from ZeRO 2 on, without a pipeline."""
        return self.zero >= 2 and self.pp == 1

    @property
    def gathers_each_pass(self) -> bool:
        """Weights are gathered for each pass and freed behind it: ZeRO 3 without a pipeline."""
        return self.zero == 3 and self.pp == 1

    @property
    def zero_ranks(self) -> tuple[int, int]:
        """Ranks over which ZeRO cuts a parameter, and an expert's."""
        if not self.zero:
            return 1, 1
        ranks = self.dp_shard * self.cp
        return ranks, ranks * self.tp // self.ep if self.ep > 1 else ranks

    def ep_pieces(self, rows: int, hidden: int, moe: MoEShape, device: str) -> int:
        """Return the number of pieces in which a rank's rows travel to experts, each to equally many."""
        if self.ep == 1 or self.ep_chunks:
            return self.ep_chunks or 1
        local, near = moe.experts // self.ep, self.ep <= NEAR
        # Few rows per expert: the gradients of a piece would cost more than its exchange hides.
        thin = rows * (self.ep - 1) < moe.experts * moe.ffn * (NEAR_ROWS if near else FAR_ROWS)
        if device != "cuda" or self.splits_backward or thin:
            return 1
        most = min(rows * hidden // EXPERT_PIECE, 4 if near else 2)
        return next(n for n in EXPERT_PIECES if n == 1 or (n <= most and local % n == 0))

    @property
    def sequence_parts(self) -> int:
        """Equal parts into which context parallelism cuts a sequence, whose length is a multiple of them."""
        return self.cp * (2 if self.context_split == "zigzag" and self.cp > 1 else 1)


WORDS: dict[str, tuple[object, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(Layout).items() if get_origin(hint) is Literal
}
"""Fields of a layout with a fixed set of words -> these words."""


def check_word(field: str, value: object) -> None:
    """Raise IllegalLayout unless a value is one of a field's words."""
    if value not in WORDS[field]:
        words = ", ".join(map(str, WORDS[field]))
        raise IllegalLayout(f"layout.{field}={value!r} is unknown: take one of {words}")


def place_of(layout: Layout, rank: int) -> dict[str, int]:
    """Return a rank's coordinate on each axis."""
    coordinates = {}
    for axis in reversed(AXES):  # the innermost axis changes with every rank
        rank, coordinates[axis] = divmod(rank, getattr(layout, axis))
    return coordinates


def rank_of(layout: Layout, coordinates: dict[str, int]) -> int:
    """Return the rank at these coordinates."""
    rank = 0
    for axis in AXES:
        rank = rank * int(getattr(layout, axis)) + coordinates[axis]
    return rank


def pipeline_ranks(layout: Layout) -> list[int]:
    """Return the first rank of each pipeline coordinate. Others of the same coordinate hold and send as much."""
    return [stage * (layout.world // layout.pp) for stage in range(layout.pp)]


def check_ranks(layout: Layout, ranks: Sequence[int]) -> None:
    """Raise PlanError unless all ranks belong to the layout."""
    for rank in ranks:
        if not 0 <= rank < layout.world:
            raise PlanError(
                f"{argument('rank', rank)} is not one of the {layout.world} ranks of the plan (0 to {layout.world - 1})"
            )


def ranks_along(layout: Layout, axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` on `axes` only, in the order of AXES."""
    coordinates = place_of(layout, rank)
    ordered = [axis for axis in AXES if axis in axes]
    ranges = [range(getattr(layout, axis)) for axis in ordered]
    return tuple(
        rank_of(layout, {**coordinates, **dict(zip(ordered, indices, strict=True))}) for indices in product(*ranges)
    )


def expert_ranks(layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (ranks that share the experts, ranks that hold the same ones) in dp_shard x cp x tp, ep innermost."""
    ranks = ranks_along(layout, ("dp_shard", "cp", "tp"), rank)
    index = ranks.index(rank)
    # Neighbours share the experts; every ep-th rank holds the same ones.
    start = index - index % layout.ep
    return ranks[start : start + layout.ep], ranks[index % layout.ep :: layout.ep]


def expert_place(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return (index among ranks that share experts, index among holders of the same ones, number of holders)."""
    block = layout.dp_shard * layout.cp * layout.tp
    index = rank % block
    return index % layout.ep, index // layout.ep, block // layout.ep


def expert_replicas(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the ranks of all replicas that hold the same experts."""
    replicas = ranks_along(layout, ("dp_replicate",), rank)
    return tuple(member for replica in replicas for member in expert_ranks(layout, replica)[1])


def own_stages(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank in ascending order."""
    return stages_of_ranks(layout.schedule, layout.pp, layout.vp)[pp_rank]


def layers_of_stages(layers: int, layout: Layout) -> list[range]:
    """Return the layers of each pipeline stage: from `layout.stages`, or dealt evenly."""
    if layout.stages:
        return ranges(layout.stages)
    return stage_layers(layers, layout.pp * layout.vp if layout.pp > 1 else 1)
