"""Context parallelism, second half: how the keys of all ranks get to the queries of each.

ring: every rank passes keys and values on to its neighbour while it computes with those it has; after c - 1 hops each
has seen all (Ring attention, Liu et al. 2023, arXiv:2310.01889). The backward pass sends them round once more, together
with their gradients, to which each rank adds its part until they are home.

gather: all keys and values are gathered before, and their gradients are reduced and scattered after (Llama 3 report,
arXiv:2407.21783, section 3.3.2).

Both keep for the backward pass what one device keeps of 1 / c of the sequence: queries, keys, values, output and
log-sum-exp of this rank's positions, never the keys of others. Let n be the bytes of a rank's keys and values. Both
send (c - 1) n forward and (c - 1) (n + their gradients in fp32) backward. The ring holds the keys of two ranks, not of
all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.attention.attend import Mask
from meshwright.kernels.attention.blockwise import STRETCH
from meshwright.kernels.attention.partial import PartialAttention, PartialGradients, Tile, can_fuse
from meshwright.kernels.chooser import device_kind
from meshwright.kernels.norm.dropout import AttentionDropout, column_keys
from meshwright.parallel.axes.context import ContextMask, Places, join_parts, places, take_at
from meshwright.parallel.groups.group import Group, find_group
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.memory.held import takes

MOST_HIDDEN = 2**20
"""Elements, queries times keys of a window, of a mask within a piece: 4 MiB."""
Attend = Callable[..., Tensor]
"""The signature of kernels.attention.attend."""


class _Packed:
    """Keys (B, K, T, E) and values (B, K, T, V) of one rank in one buffer, so that a hop is one message."""

    def __init__(self, shapes: tuple[torch.Size, torch.Size], buffer: Tensor) -> None:
        cut = shapes[0].numel()
        self.shapes, self.buffer = shapes, buffer
        self.keys, self.values = buffer[:cut].view(shapes[0]), buffer[cut:].view(shapes[1])

    @classmethod
    @takes("buffers")
    def copy(cls, keys: Tensor, values: Tensor) -> "_Packed":
        """Copy tensors (B, K, T, .) of any strides."""
        packed = cls((keys.shape, values.shape), keys.new_empty(keys.numel() + values.numel()))
        packed.keys.copy_(keys)
        packed.values.copy_(values)
        return packed

    def like(self, buffer: Tensor) -> "_Packed":
        """Return another buffer in the same shapes."""
        return _Packed(self.shapes, buffer)

    @takes("buffers")
    def zeros(self) -> "_Packed":
        """Return a zeroed buffer for fp32 gradients."""
        return self.like(torch.zeros_like(self.buffer, dtype=torch.float32))


class _Travelling:
    """A buffer on its way to the next rank, and the previous rank's on its way here."""

    @takes("buffers")
    def __init__(self, group: Group, buffer: Tensor) -> None:
        self.sent, self.received = buffer, torch.empty_like(buffer)
        following, previous = (group.index + 1) % group.size, (group.index - 1) % group.size
        self.work: list[dist.Work] = group.exchange([(buffer, following)], [(self.received, previous)])
        if not group.overlaps:
            self.wait()

    def wait(self) -> Tensor:
        """Return the buffer that has arrived."""
        for work in self.work:
            work.wait()
        self.work = []  # Gloo hangs when it waits twice for the same work
        return self.received


class _Ring:
    """Keys and values hop from rank to rank, and the sums of their gradients follow one hop behind."""

    def __init__(self, group: Group, mask: ContextMask, packed: _Packed) -> None:
        self.group, self.mask, self.packed = group, mask, packed
        self.home: _Packed | None = None
        self.sums: _Travelling | None = None

    def parts(self) -> Iterator[tuple[_Packed, Places]]:
        """Yield this rank's keys, then those of the ranks before it. The next travel while the present are used."""
        size, index, buffer = self.group.size, self.group.index, self.packed.buffer
        for step in range(size):
            # Started before the present keys are used, so that the next ones travel meanwhile.
            hop = _Travelling(self.group, buffer) if step < size - 1 else None
            yield self.packed.like(buffer), self.mask.keys_of(size, (index - step) % size)
            if hop is not None:
                buffer = hop.wait()

    def give_back(self, gradients: _Packed) -> None:
        """Add the gradients of the present part to the sum of the ranks before, and send it to the next rank.

        The gradients of this rank's own part wait here for the others.
        """
        if self.home is None:
            self.home = gradients
            return
        if self.sums is not None:
            gradients.buffer.add_(self.sums.wait())
        self.sums = _Travelling(self.group, gradients.buffer)

    def returned(self) -> _Packed:
        """Return all ranks' gradients of this rank's keys and values, fp32."""
        assert self.home is not None
        if self.sums is not None:
            self.home.buffer.add_(self.sums.wait())
        return self.home


class _Gather:
    """Keys and values of the whole sequence, in its order, as one part. Stripes are one part each."""

    def __init__(self, group: Group, mask: ContextMask, packed: _Packed) -> None:
        self.group, self.mask, self.packed = group, mask, packed
        self.pieces: list[Tensor] = []

    def parts(self) -> Iterator[tuple[_Packed, Places]]:
        """Yield all keys at once."""
        buffers = self.group.all_gather(self.packed.buffer.unsqueeze(0))
        ranks = [self.packed.like(buffer) for buffer in buffers]
        if self.mask.split == "striped":
            yield from ((rank, self.mask.keys_of(len(ranks), index)) for index, rank in enumerate(ranks))
            return
        keys = join_parts([rank.keys for rank in ranks], self.mask.split, 2)
        values = join_parts([rank.values for rank in ranks], self.mask.split, 2)
        yield _Packed.copy(keys, values), Places((0,), self.mask.sequence)

    @takes("buffers")
    def give_back(self, gradients: _Packed) -> None:
        """Cut the gradients of the whole sequence into each rank's positions."""
        if self.mask.split == "striped":
            self.pieces.append(gradients.buffer)
            return
        size = self.group.size
        ranks = [self.mask.keys_of(size, index) for index in range(size)]
        self.pieces = [
            _Packed.copy(take_at(gradients.keys, at, 2), take_at(gradients.values, at, 2)).buffer for at in ranks
        ]

    @takes("buffers")
    def returned(self) -> _Packed:
        """Return all ranks' gradients of this rank's keys and values, fp32."""
        return self.packed.like(self.group.reduce_scatter(torch.cat(self.pieces)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Attention of one sequence that ranks share: the ranks, the route of keys, and the mask."""

    mask: ContextMask
    scale: float
    group: Group
    route: type[_Ring] | type[_Gather]
    dropout: AttentionDropout | None = None

    def fuses(self, q: Tensor, k: Tensor) -> bool:
        """Return whether a fused kernel runs: none has these masks of dropout."""
        return self.dropout is None and can_fuse(q, k)

    def columns(self, keys: Places, device: torch.device) -> Tensor | None:
        """Return the keys (T,) of a part's positions for dropout."""
        if self.dropout is None:
            return None
        return column_keys(keys.positions(0, len(keys.starts) * keys.length, device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, S/c, H, V) and the log-sum-exp (B, H, S/c)."""
        fused = self.fuses(q, k)
        attention = PartialAttention(q, v.shape[-1], scale=self.scale, fused=fused, dropout=self.dropout)
        for part, at in self.route(self.group, self.mask, _pack(k, v)).parts():
            attention.add(part.keys, part.values, _tiles(self.mask, at, q, fused), self.columns(at, q.device))
        return attention.result()

    def gradients(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        fused = self.fuses(q, k)
        gradients = PartialGradients(q, out, lse, gradient, scale=self.scale, fused=fused, dropout=self.dropout)
        # The keys travel a second time: keeping them since the forward pass would hold those of all ranks.
        route = self.route(self.group, self.mask, _pack(k, v))
        for part, at in route.parts():
            sums = part.zeros()
            tiles = _tiles(self.mask, at, q, fused)
            gradients.add(part.keys, part.values, tiles, sums.keys, sums.values, self.columns(at, q.device))
            route.give_back(sums)
        home = route.returned()
        k_gradient, v_gradient = home.keys.transpose(1, 2).to(k.dtype), home.values.transpose(1, 2).to(v.dtype)
        return gradients.result(), k_gradient, v_gradient


class _ContextAttention(torch.autograd.Function):
    """Autograd function: q (B, S/c, H, E), k (B, S/c, K, E), v (B, S/c, K, V) -> (B, S/c, H, V)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shared: _Shared) -> Tensor:
        out, lse = shared.attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shared = shared
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *ctx.shared.gradients(gradient, *ctx.saved_tensors), None


ROUTES: dict[str, type[_Ring] | type[_Gather]] = {"ring": _Ring, "all-gather": _Gather}
"""Route by word of layout.context."""


@torch.library.custom_op("meshwright::context_attention", mutates_args=())
def context_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None,
    window: int, split: str, scale: float, group: int, route: str, rate: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attend and its log-sum-exp, as one operator of compiled code."""
    return _shared(q, bounds, window, split, scale, group, route, rate, rows).attend(q, k, v)


@context_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None,
    window: int, split: str, scale: float, group: int, route: str, rate: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op("meshwright::context_attention_backward", mutates_args=())
def context_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bounds: Tensor | None, rows: Tensor | None, window: int, split: str, scale: float, group: int, route: str,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, each (B, heads, S/c, width), contiguous."""
    shared = _shared(q, bounds, window, split, scale, group, route, rate, rows)
    gradients = shared.gradients(gradient, q, k, v, out, lse)
    q_gradient, k_gradient, v_gradient = (gradient.transpose(1, 2).contiguous() for gradient in gradients)
    # Outputs of an operator must not share memory.
    shares = k_gradient.untyped_storage().data_ptr() == v_gradient.untyped_storage().data_ptr()
    return q_gradient, k_gradient, v_gradient.clone() if shares else v_gradient


@context_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bounds: Tensor | None, rows: Tensor | None, window: int, split: str, scale: float, group: int, route: str,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q_gradient, k_gradient, v_gradient = (x.new_empty(x.transpose(1, 2).shape) for x in (q, k, v))
    return q_gradient, k_gradient, v_gradient


def _shared(
    q: Tensor, bounds: Tensor | None, window: int, split: str, scale: float, group: int,
    route: str, rate: float, rows: Tensor | None,
) -> _Shared:  # fmt: skip
    ranks = find_group(group)
    queries = places(q.shape[1] * ranks.size, ranks.size, ranks.index, split)
    mask = ContextMask.make(ranks, queries, split, q.device, bounds, window)
    dropout = None if rows is None else AttentionDropout(rate, rows)
    return _Shared(mask=mask, scale=scale, group=ranks, route=ROUTES[route], dropout=dropout)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, *ctx.options, rows = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, rows)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = context_attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return *(part.transpose(1, 2) for part in gradients), *(None,) * 8


context_attention.register_autograd(_backward, setup_context=_setup)


def context_attend(group: Group, route: str) -> Attend:
    """Return attention of this rank's queries over all ranks' keys, by one of ROUTES: a collective in both passes."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> Tensor:
        if not isinstance(mask, ContextMask):
            raise IllegalLayout(
                f"attention over layout.cp={group.size} ranks got a mask for one device: install "
                "parallel.axes.context.mask_maker in place of model.seams.mask"
            )
        if torch.compiler.is_compiling():
            # An operator takes tensors and plain numbers, so the mask and the group go in pieces.
            options = mask.window, mask.split, scale, group.number, route, *(dropout or (0.0, None))
            traced: Tensor = context_attention(q, k, v, mask.bounds, *options)[0]
            return traced
        shared = _Shared(mask=mask, scale=scale, group=group, route=ROUTES[route], dropout=dropout)
        out: Tensor = _ContextAttention.apply(q, k, v, shared)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return out

    return attend


def _pack(k: Tensor, v: Tensor) -> _Packed:
    return _Packed.copy(k.transpose(1, 2), v.transpose(1, 2))


def _tiles(mask: ContextMask, keys: Places, q: Tensor, fused: bool) -> Iterator[Tile]:
    """Return tiles. A CPU's fused kernel takes the borders of a window as a mask, so queries come in pieces."""
    if not fused:
        return mask.blocks(keys)
    few = min(mask.window // 4, MOST_HIDDEN // max(1, mask.window))
    return mask.chunks(keys, max(STRETCH, few) if device_kind(q) == "cpu" else 0)
