"""Work that an operation asks of a device (a matrix product, an attention core, a memory pass) and of a link."""

from typing import Literal, NamedTuple

from meshwright.planner.kernels.kernel_operations import AttentionCore, Product


class MemoryPass(NamedTuple):
    """Bytes read and written, in `launches` kernels."""

    moved_bytes: float
    launches: float = 1.0


Work = Product | AttentionCore | MemoryPass


Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring"]


class Exchange(NamedTuple):
    """Collective of a micro-batch. `size_bytes` is the whole tensor (what a rank has after a gather)."""

    axis: Literal["tp", "cp", "ep"]
    collective: Collective
    size_bytes: float
    times: float = 1.0
    beside: tuple[Work, ...] = ()
    """Work that runs during the exchange."""
    within: tuple[Work, ...] = ()
    """Work in as many pieces as there are calls. Each call overlaps with all pieces but its own."""
    share: float = 1.0
    """Share of that work that does."""
    first: tuple["Exchange", ...] = ()
    """Exchanges during the same work, which is assumed to hide them before this one."""


class Exchanges(NamedTuple):
    """Exchanges of a forward and a backward pass."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()


NO_EXCHANGES = Exchanges()


class LayerOperation(NamedTuple):
    """One operation of the forward pass, and its backward pass.

    `again`: repeated by selective recomputation. Exchanges follow the operation's work.
    """

    name: str
    forward: tuple[Work, ...] = ()
    inputs: tuple[Work, ...] = ()
    """Gradients of its inputs."""
    weights: tuple[Work, ...] = ()
    """Gradients of its weights."""
    exchanges: Exchanges = NO_EXCHANGES
    again: bool = False


class KeptBytes(NamedTuple):
    """Bytes of a tensor from a layer's forward to its backward pass, without and with selective recomputation.

    `part`: norm = an output of a norm, core = an input or output of the attention core, scores = its S x S weights.
    """

    name: str
    none: float
    selective: float
    part: Literal["", "norm", "core", "scores"] = ""


def in_fp32(op: LayerOperation) -> LayerOperation:
    """Return the operation with its products in fp32."""

    def wide(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(work._replace(width=4.0) if isinstance(work, Product) else work for work in works)

    return op._replace(forward=wide(op.forward), inputs=wide(op.inputs), weights=wide(op.weights))
