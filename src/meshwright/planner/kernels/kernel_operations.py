"""Operations whose time is estimated: matrix products, attention cores, and the operations of serving."""

from typing import Literal, NamedTuple


class Product(NamedTuple):
    """(m, k) x (k, n), `batch` times, 2 m n k FLOP each."""

    m: float
    k: float
    n: float
    batch: float = 1.0
    width: float = 2.0
    """Bytes of an operand: 4 fp32, 2 bf16 or fp16, 1 fp8, 0.5 fp4."""
    moved: float = 2.0
    """Bytes of an element of the result that are read and written: 8 where it is added to a sum in fp32."""
    grouped: bool = False
    """True for as many matrices as experts, in one kernel that is told where the rows of each begin."""
    calls: int = 1
    """Number of kernels that run one after the other, each of them such a product."""

    @property
    def flop(self) -> float:
        """FLOP of all calls."""
        return 2.0 * self.m * self.k * self.n * self.batch * self.calls


CoreKind = Literal["rows", "documents", "window", "parts", "parts of documents"]
"""Part that a core is called for.
rows: whole causal rows. documents: documents behind one another, where the kernel reads where each begins. window: a
window. parts: parts of rows or of documents, which ranks have.
"""


class AttentionCore(NamedTuple):
    """A fused attention core. `flop` as executed (causal: half). Short rows and narrow heads fill a kernel less."""

    flop: float
    backward: bool = False
    sequence: float = 1e9
    dim: float = 128.0
    masked: bool = False
    """True under a mask that is a tensor: another, slower kernel, which leaves nothing out."""
    width: float = 2.0
    """Bytes of an operand."""
    kernel: CoreKind = "rows"


class Prefill(NamedTuple):
    """Causal attention of `batch` sequences."""

    batch: float
    sequence: float
    heads: float
    kv_heads: float
    dim: float = 128.0


class Decode(NamedTuple):
    """Attention of one new token for each of `batch` sequences over `context` cached ones."""

    batch: float
    context: float
    heads: float
    kv_heads: float
    dim: float = 128.0


class FusedExperts(NamedTuple):
    """Fused experts of one of tp x ep ranks. `skew`: exponent of the power law of routing, 0 = even."""

    tokens: float
    hidden: float
    ffn: float
    top_k: float
    experts: float
    tp: float = 1.0
    ep: float = 1.0
    skew: float = 0.0


class Collective(NamedTuple):
    """A collective of `ranks` GPUs in a node. `size_bytes` of the whole tensor, as nccl-tests count them."""

    name: str
    size_bytes: float
    ranks: float


Operation = Product | Prefill | Decode | FusedExperts | Collective
