"""What one micro-batch is on one rank: all that counting its operations and what they keep needs of a layout."""

from dataclasses import dataclass
from functools import cached_property

from meshwright.planner.cost.stack import Stack, plain_code
from meshwright.spec.compiled_blocks import compiles_blocks, is_lowered, keeps_no_norms
from meshwright.spec.layout import Layout
from meshwright.spec.linear_attention import LinearAttention
from meshwright.spec.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.recipe import NO_SCHEME
from meshwright.spec.schedule_kinds import SPLIT_ALWAYS
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Local:
    """One micro-batch on one rank. Its sizes are read some hundred times: each is counted once."""

    shape: ModelShape
    stack: Stack
    batch: int
    """Sequences."""
    sequence: int
    """Positions of the whole sequence."""
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    ring: bool = True
    width: int = 2
    """Bytes of an activation."""
    context_split: str = "zigzag"
    product_width: float = 2.0
    """Bytes of an operand of the layers' products."""
    fp8: bool = False
    """The engine rounds the operands of these products itself (kernels.fp8)."""
    fp8_all: bool = False
    """Those of weight gradients and of experts, too."""
    dropout: bool = False
    documents: bool = False
    """Attention has a mask of documents."""
    document_tokens: float = 0.0
    """Of the document that a token is in, on average; 0 = it fills its row."""
    compares: bool = False
    """The objective is over pairs: it asks for log-probabilities, and makes logits again for the backward pass."""
    window: int = 0
    """Sliding window of the layer that is counted."""
    linear: LinearAttention | None = None
    """Of the layer that is counted; None = it keeps keys and values."""
    splits: bool = False
    """The schedule splits backward passes: gradients of weights come later."""
    compiled: bool = False
    """Blocks are compiled."""
    keeps_norms: bool = True
    """Blocks that recompute nothing keep what norms make."""
    lowered: bool = False
    """Compiled blocks of a GPU that speak with no other rank: their code makes again whatever a few passes over tensors
    that are kept anyway can make, and has a backward pass of its own (spec/compiled_blocks.py)."""
    gpu: bool = False
    """Of a device whose kernels are those of a GPU."""
    pieces: int = 1
    """Of a sequence, in tensor-parallel products."""
    rounded: Scheme | None = None
    """Of matrices that are rounded in every product."""
    ep_pieces: int = 1
    """In which tokens travel to experts."""

    @property
    def repeats(self) -> bool:
        """Whether keys and values are kept once for each head: on a GPU in fp32, where no strips read them and no
        compiled code repeats them again."""
        apart = self.cp == 1 and not self.masked and not self.lowered
        return apart and self.stack.own and self.stack.attention == "flash" and self.gpu and self.width >= 4

    @property
    def masked(self) -> bool:
        """Whether documents, a window or other ranks' positions hide keys and no kernel leaves these out: in fp32 on a
        GPU (kernels/strips.py, kernels/partial.py)."""
        hidden = 0 < self.window < self.sequence or self.documents or self.cp > 1
        return self.stack.own and hidden and self.gpu and self.width >= 4

    @property
    def uneven(self) -> float:
        """Attention's work of the rank that has most, over the mean: of chunks that of the last, whose queries see all
        that a window lets them. Without one it is (2 c - 1) / c."""
        if self.context_split != "chunks":
            return 1.0
        whole, begin = float(self.sequence), self.sequence * (1 - 1 / self.cp)
        reach = min(self.window or whole, whole)
        narrow = max(reach, begin)  # from here on a window is full
        last = ((narrow**2 - begin**2) / 2 + reach * (whole - narrow)) / (whole - begin)
        return last / (reach - reach**2 / (2 * whole))

    @cached_property
    def gates(self) -> int:
        """Matrices that read an MLP's input."""
        return 2 if self.shape.mlp == "swiglu" else 1

    @cached_property
    def tokens(self) -> float:
        """N: tokens of the rank."""
        return self.batch * self.sequence / self.cp

    @cached_property
    def between(self) -> float:
        """Tokens of the rank between tensor-parallel regions."""
        return self.tokens / self.tp if self.sp else self.tokens

    @cached_property
    def hidden_bytes(self) -> float:
        """Of (N, D)."""
        return self.tokens * self.shape.hidden * self.width

    @cached_property
    def between_bytes(self) -> float:
        """Of (N, D) where sequence parallelism shares it."""
        return self.between * self.shape.hidden * self.width


def local(
    shape: ModelShape, stack: Stack, layout: Layout, sequence: int, batch: int, width: int, dropout: float = 0.0,
    documents: bool = False, gpu: bool = False, products: str = "same", compares: bool = False,
    fake_quantize: str = NO_SCHEME, document_tokens: float = 0.0,
) -> Local:  # fmt: skip
    """What the counting needs to know of a layout."""
    kind, positions, moe = "cuda" if gpu else "cpu", sequence // layout.cp, shape.moe
    rows = batch * positions // (layout.tp if layout.sp else 1) * moe.top_k if moe else 0
    lowered = stack.own and gpu and is_lowered(layout, shape, fake_quantize)
    if stack.own and layout.kernels == "reference":
        stack = plain_code(stack, layout, width, compiled=lowered)
    return Local(
        shape=shape,
        stack=stack,
        batch=batch,
        sequence=sequence,
        tp=layout.tp,
        sp=layout.sp and layout.tp > 1,
        cp=layout.cp,
        ep=layout.ep,
        ring=layout.context == "ring",
        context_split=layout.context_split,
        width=width,
        product_width=min(width, stack.product_bytes) if width == 2 else width,
        fp8=stack.own and products != "same",
        fp8_all=stack.own and products == "fp8-all",
        dropout=stack.dropout or dropout > 0,
        documents=documents and stack.own,
        document_tokens=document_tokens if documents and stack.own else 0.0,
        compares=compares and stack.own,
        splits=stack.own and layout.pp > 1 and layout.schedule in SPLIT_ALWAYS,
        compiled=stack.own and compiles_blocks(layout, shape, kind, fake_quantize),
        keeps_norms=not (stack.own and keeps_no_norms(layout, shape, kind, fake_quantize)),
        lowered=lowered,
        gpu=gpu,
        rounded=SCHEMES.get(fake_quantize) if stack.own else None,
        pieces=layout.tp_pieces(positions, shape.hidden, kind) if stack.own else 1,
        ep_pieces=layout.ep_pieces(rows, shape.hidden, moe, kind) if stack.own and moe else 1,
    )
