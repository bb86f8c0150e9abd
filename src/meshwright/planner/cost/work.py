"""What an operation asks of a device: a matrix product, an attention core, a pass over memory; and of a link."""

from typing import Literal, NamedTuple

from meshwright.planner.kernels.kernel_operations import AttentionCore, Product


class MemoryPass(NamedTuple):
    """Bytes read and written, in `launches` kernels."""

    moved_bytes: float
    launches: float = 1.0


Work = Product | AttentionCore | MemoryPass


Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring"]


class Exchange(NamedTuple):
    """A collective of a micro-batch: `size_bytes` is the whole tensor (what a rank has after a gather)."""

    axis: Literal["tp", "cp", "ep"]
    collective: Collective
    size_bytes: float
    times: float = 1.0
    beside: tuple[Work, ...] = ()
    """Work that runs while it is under way."""
    within: tuple[Work, ...] = ()
    """Work in as many pieces as there are calls. All but the own piece's runs beside a call."""
    share: float = 1.0
    """So much of that work does."""
    first: tuple["Exchange", ...] = ()
    """Those that run beside the same work as this one, and are taken to be hidden by it first."""


class Exchanges(NamedTuple):
    """Those of a forward and of a backward pass."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()


NO_EXCHANGES = Exchanges()


class LayerOperation(NamedTuple):
    """One operation of the forward pass and what the backward pass makes of it.

    `again`: repeated by selective recomputation. Exchanges belong to the operation after whose work they stand.
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
    """Bytes that live from a layer's forward to its backward pass, under no and under selective recomputation. `of`:
    what a norm makes; what the attention core reads and makes; what it stores in between, its S x S weights."""

    name: str
    none: float
    selective: float
    of: Literal["", "norm", "core", "scores"] = ""


def in_fp32(op: LayerOperation) -> LayerOperation:
    """The same with its products in fp32."""

    def wide(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(work._replace(width=4.0) if isinstance(work, Product) else work for work in works)

    return op._replace(forward=wide(op.forward), inputs=wide(op.inputs), weights=wide(op.weights))
