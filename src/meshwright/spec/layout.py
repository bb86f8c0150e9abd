"""Layout: whatever must not change the loss curve: degrees, micro-batch, ZeRO, schedule, recomputation, kernels,
saving."""

from dataclasses import dataclass, replace
from typing import Literal, get_args, get_origin, get_type_hints

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.schedule_kinds import SPLIT, ScheduleName
from meshwright.spec.shape import MoEShape

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the outermost to the innermost: tp ranks are neighbours. ep is carved out of dp_shard x cp x tp."""


Recompute = Literal["none", "norms", "selective", "all-but-attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
OFFLOADED: tuple[Recompute, ...] = ("none", "norms", "full")
"""Policies under which all that a block keeps can be moved to host memory; the others keep some of it by themselves."""


PIECED = 2**25
"""Elements of a sequence's hidden states from which on sending half of them takes longer than starting another
collective."""
NEAR = 8
"""Ranks of one node: between nodes starting a collective takes longer."""
EXPERT_PIECE = 2**24
"""Elements of the rows that a rank sends to experts, of each piece at the least: sending less costs more to start than
it hides."""
EXPERT_PIECES = (4, 2, 1)
"""How many there can be, where no layout says it. Between nodes two hide as much as more do: sending takes longer than
the experts."""
NEAR_ROWS, FAR_ROWS = 0.4, 0.04
"""Rows that an expert gets from other ranks, of its inner width, from which on pieces pay inside a node and between
nodes: what they make of the gradients of its matrices is put together by a pass over memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is laid over devices. Every degree is declared here; 1 = not used."""

    dp_replicate: int = 1
    """Data parallel: replicas that hold the same shards; auto = what the number of processes leaves."""
    dp_shard: int = 1
    """Data parallel: ranks that share one replica (ZeRO, FSDP); auto = what the number of processes leaves."""
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
    """Sequence-sharded norms and dropout between TP blocks."""
    tp_chunks: int = 0
    """Pieces in which sequences pass the products of TP blocks, so that the collectives of one run beside the products
    of the next; 0 = 2 on a GPU, from 2**25 elements of hidden states on and for at most 8 ranks; else 1."""
    ep_chunks: int = 0
    """Pieces in which tokens go to the experts of other ranks and back, each to an equal part of a rank's experts, so
    that those of one compute while the next travels; 0 = 4 on a GPU for at most 8 ranks, 2 for more, of at least 2**24
    elements each, where experts have rows enough and the schedule splits no backward pass; else 1."""
    context: Literal["ring", "all-gather"] = "ring"
    """How context-parallel ranks see each other's keys: passed round in a ring while computing, or gathered first."""
    context_split: Literal["zigzag", "striped", "chunks"] = "zigzag"
    """Positions of a context-parallel rank: a chunk from the front and one from the back (zigzag), every cp-th one
    (striped), or one chunk. The first two give causal attention even work."""
    schedule: ScheduleName = "1f1b"
    """Order of the pipeline's forward and backward passes."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage, from the embedding to the head; [] = even, both ends counting as a layer."""
    micro_batch: int = 0
    """Sequences of one forward pass on one rank; 0 = the whole global batch of the rank."""
    recompute: Recompute = "none"
    """What the backward pass makes again. norms: what norms make; selective: the attention core, where it stores its
    S x S weights (kernels=reference), else nothing; all-but-attention: all but the attention core; full: all but layer
    borders."""
    recompute_layers: int = 0
    """Layers of each pipeline stage that do so, its first ones; the others keep everything. 0 = all."""
    offload: Literal["off", "activations"] = "off"
    """activations: what a block keeps for its backward pass is held in host memory, except for each stage's last
    block. With recompute none, norms and full."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of each block: auto = on a GPU, where the planner finds the whole run faster so, or where nothing
    else fits."""
    cuda_graphs: Literal["auto", "off", "on"] = "auto"
    """on: a micro-batch's forward and backward pass is captured as a CUDA graph and launched in one call, for models
    whose kernels are shorter than their launches. On GPUs with data parallelism alone (zero=0). auto = where the
    planner finds steps faster so by a twentieth."""
    kernels: Literal["auto", "eager", "triton", "reference"] = "auto"
    """auto = Triton's where they are better, on a GPU; eager = torch's own operations; triton = Triton's wherever they
    can run; reference = the plain twins, for comparison."""
    saving: Literal["auto", "async", "sync"] = "auto"
    """async: a checkpoint is copied to host memory, then written while training goes on; auto = on a GPU only."""

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
            if getattr(self, field) not in words:
                known_word(field, getattr(self, field))

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """Number of ranks. ep is not a factor: it borrows ranks from dp_shard x cp x tp."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def policies(self) -> tuple[Recompute, ...]:
        """Those that it may have."""
        return RECOMPUTE if self.offload == "off" else OFFLOADED

    @property
    def writes_scores(self) -> bool:
        """Whether this package's attention stores its S x S weights: that of the plain kernels, within a rank."""
        return self.kernels == "reference" and self.cp == 1

    @property
    def acting_recompute(self) -> Recompute:
        """What this package's engine does: `selective` has nothing to drop where no S x S weights are stored."""
        return "none" if self.recompute == "selective" and not self.writes_scores else self.recompute

    def recomputed(self, layers: int) -> int:
        """How many of a stage's so many layers recompute: its first ones."""
        if self.recompute == "none":
            return 0
        return min(layers, self.recompute_layers or layers)

    def compiles(self, device: str) -> bool:
        """Whether it has compiled blocks on a kind of device (cpu, cuda). auto is one of a search, which looks at what
        holds least (planner/step/execution.py); an engine runs it plainly."""
        return self.compile == "on" or (self.compile == "auto" and device == "cuda")

    @property
    def plain(self) -> "Layout":
        """The same with neither compiled blocks nor graphs, where it leaves them open."""
        compiled = "off" if self.compile == "auto" else self.compile
        return replace(self, compile=compiled, cuda_graphs="off" if self.cuda_graphs == "auto" else self.cuda_graphs)

    def saves_behind(self, device: str) -> bool:
        """Whether a thread writes the checkpoints of a program on a kind of device (cpu, cuda). On a CPU the copy would
        take the memory and the write the cores that training has, so there only where it is asked for."""
        return self.saving == "async" or (self.saving == "auto" and device == "cuda")

    def micro_batch_of(self, global_batch: int) -> int:
        """Sequences of one forward pass on one rank, for a step of `global_batch`; the field caps it."""
        per_rank = global_batch // self.dp
        return min(self.micro_batch, per_rank) if self.micro_batch else per_rank

    def micro_batches(self, global_batch: int) -> int:
        """Forward passes of one rank in a step of `global_batch` sequences (the gradient accumulation)."""
        per_rank = global_batch // self.dp
        size = self.micro_batch_of(global_batch)
        if size * self.dp == 0 or per_rank * self.dp != global_batch or per_rank % size:
            raise IllegalLayout(self._batch_sentence(global_batch))
        return per_rank // size

    def even_micro_batches(self, global_batch: int) -> int:
        """As `micro_batches`; 0 where a rank's sequences do not come out even."""
        per_rank, size = global_batch // self.dp, self.micro_batch_of(global_batch)
        return 0 if not size or per_rank % size else per_rank // size

    def tp_pieces(self, positions: int, hidden: int, device: str) -> int:
        """In how many pieces the positions of a rank's sequences pass tensor-parallel products on a kind of device.
        Pieces are equal, and with sp each rank has an equal part of each; where that cannot be, it is one."""
        if self.tp == 1:
            return 1
        pieces = self.tp_chunks or (2 if device == "cuda" and positions * hidden >= PIECED and self.tp <= NEAR else 1)
        return 1 if positions % (pieces * (self.tp if self.sp else 1)) else pieces

    @property
    def splits_backward(self) -> bool:
        """Whether any backward pass leaves the gradients of weights for later."""
        return self.pp > 1 and self.schedule in SPLIT

    def ep_pieces(self, rows: int, hidden: int, moe: MoEShape, device: str) -> int:
        """In how many pieces a rank's rows, each for one expert, travel on a kind of device. Each piece is for as many
        experts of a rank."""
        if self.ep == 1 or self.ep_chunks:
            return self.ep_chunks or 1
        local, near = moe.experts // self.ep, self.ep <= NEAR
        thin = rows * (self.ep - 1) < moe.experts * moe.ffn * (NEAR_ROWS if near else FAR_ROWS)
        if device != "cuda" or self.splits_backward or thin:
            return 1
        most = min(rows * hidden // EXPERT_PIECE, 4 if near else 2)
        return next(n for n in EXPERT_PIECES if n == 1 or (n <= most and local % n == 0))

    @property
    def sequence_parts(self) -> int:
        """Equal parts that context parallelism cuts a sequence into; it is a multiple of them."""
        return self.cp * (2 if self.context_split == "zigzag" and self.cp > 1 else 1)

    def _batch_sentence(self, global_batch: int) -> str:
        unit = max(1, self.micro_batch) * self.dp
        nearest = max(1, round(global_batch / unit)) * unit
        return (
            f"recipe.global_batch={global_batch} is not micro_batch={max(1, self.micro_batch)} x accumulation x "
            f"dp={self.dp} for any whole accumulation: take recipe.global_batch={nearest}"
        )


WORDS: dict[str, tuple[object, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(Layout).items() if get_origin(hint) is Literal
}
"""Fields of a layout that are one of a few words, and which."""


def known_word(field: str, value: object) -> None:
    """Refuse a value that is not one of a field's words."""
    if value not in WORDS[field]:
        words = ", ".join(map(str, WORDS[field]))
        raise IllegalLayout(f"layout.{field}={value!r} is unknown: take one of {words}")
