"""Attention of whole sequences on a CPU and its gradients, for training, by sequence_attention.c.

Letters: B batch, S positions, H query heads, K key heads, E width of keys and V of values.
"""

import ctypes

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.c.build import structure
from meshwright.kernels.c.training_rows import DTYPES, VECTOR, library

TILE = 64
"""Queries and keys of a tile, as in sequence_attention.c."""
WIDEST = 256
"""Widest head that was tried."""
Documents = list[tuple[slice, int, int]]
"""Rows, first position, and position after the last, of each document."""


def takes_heads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the loops support widths and dtype of q (B, S, H, E), k (B, S, K, E) and v (B, S, K, V).

    Also checks that the three fit each other: C would read past the end, where torch repeats a row or refuses.
    """
    return k.shape[1] == q.shape[1] and takes_parts(q, k, v)


def takes_parts(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return the same for queries (B, S, H, E) over T other keys: k (B, T, K, E) and v (B, T, K, V)."""
    fit = k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3] and v.shape[:3] == k.shape[:3]
    has_type = q.dtype in DTYPES and q.dtype == k.dtype == v.dtype and q.shape[2] % k.shape[2] == 0
    fit = fit and has_type and compat.lies_in_memory(q, k, v)
    return fit and all(x.shape[3] % VECTOR == 0 and x.shape[3] <= WIDEST for x in (q, v))


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, window: int, scale: float, past: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attend q (B, S, H, E) over k (B, S, K, E) and v (B, S, K, V): (B, S, H, V), and log-sum-exp (B, H, S) fp32.

    With `past`, k and v are T other keys: query i sees those up to i + past. `documents` are then whole rows, and there
    is no window.
    """
    q, k, v = map(_side_by_side, (q, k, v))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    sums = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    widths, group = q.shape[3] + v.shape[3], q.shape[2] // k.shape[2]
    # As attend_sequences of sequence_attention.c divides the scratch of a thread.
    scratch_floats = TILE * (group * widths + widths + TILE + max(q.shape[3], v.shape[3]))
    threads = torch.get_num_threads()
    scratch = _allocate_scratch(q, threads * scratch_floats)
    if not compat.is_fake(q):
        tensors = {"q": q, "k": k, "v": v, "out": out, "gradient": out}
        spans = _document_list(documents)
        fields = _fields(
            tensors, sums, scratch, spans, past, window=window, scale=scale, parts=1, threads=threads,
            scratch_floats=scratch_floats,
        )  # fmt: skip
        if library().attend_sequences(ctypes.byref(fields)):
            raise MemoryError(f"no memory for a list of {len(spans)} documents")
    return out, sums


def gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, documents: Documents, *, window: int,
    scale: float, past: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v from that of the result (B, S, H, V), the result and its log-sum-exp.

    One thread has a document and key head, or some of its query heads where there are few.
    """
    gradient, q, k, v, out = map(_side_by_side, (gradient, q, k, v, out))
    threads, group = torch.get_num_threads(), q.shape[2] // k.shape[2]
    parts = _parts(len(q) * k.shape[2], group, threads)
    q_gradient = q.new_empty(q.shape)
    k_gradient, v_gradient = (_parted(x, parts) for x in (k, v))
    longest = max(end - begin for _, begin, end in documents)
    scratch_floats = TILE * (4 * (q.shape[3] + v.shape[3]) + 5 * TILE // 2) + group // parts * longest * (
        q.shape[3] + 1
    )
    scratch = _allocate_scratch(q, threads * scratch_floats)
    if not compat.is_fake(q):
        tensors = {
            "q": q, "k": k, "v": v, "out": out, "gradient": gradient, "q_gradient": q_gradient,
            "k_gradient": k_gradient, "v_gradient": v_gradient,
        }  # fmt: skip
        spans = _document_list(documents)
        fields = _fields(
            tensors, sums, scratch, spans, past, window=window, scale=scale, parts=parts, threads=threads,
            scratch_floats=scratch_floats,
        )  # fmt: skip
        library().sequences_gradients(ctypes.byref(fields))
    if parts > 1:
        k_gradient, v_gradient = (x.unflatten(2, (-1, parts)).sum(3).to(q.dtype) for x in (k_gradient, v_gradient))
    return q_gradient, k_gradient, v_gradient


def _parts(units: int, group: int, threads: int) -> int:
    """Return into how many parts the `group` query heads of a unit, a row and key head, are cut.

    Enough parts keep all threads busy to the end.
    """
    cuts = (n for n in range(1, group) if group % n == 0 and (threads == 1 or n * units >= 2 * threads))
    return next(cuts, group)


def _parted(x: Tensor, parts: int) -> Tensor:
    """Allocate gradients of keys or values. Parts are added in fp32."""
    size = (*x.shape[:2], x.shape[2] * parts, x.shape[3])
    return x.new_empty(size, dtype=torch.float32 if parts > 1 else x.dtype)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _allocate_scratch(like: Tensor, count: int) -> Tensor:
    """Allocate scratch memory in torch, where memory counters see it."""
    return like.new_empty(count, dtype=torch.float32)


def _document_list(documents: Documents) -> Tensor:
    """List (row, begin, end) as (N, 3) int64."""
    spans = [(row, begin, end) for rows, begin, end in documents for row in range(rows.start, rows.stop)]
    return torch.tensor(spans, dtype=torch.int64, device="cpu")


def _fields(
    tensors: dict[str, Tensor], sums: Tensor, scratch: Tensor, spans: Tensor, past: int | None, **fields: float
) -> ctypes.Structure:
    """Return the struct Sequences of tensors (B, S, heads, width) with contiguous rows. It keeps none of them alive."""
    q, k, v = (tensors[name] for name in "qkv")
    strided = {
        name: structure("Strided")(
            data=x.data_ptr(), row=x.stride(0), position=x.stride(1), head=x.stride(2), narrow=x.dtype == torch.bfloat16
        )
        for name, x in tensors.items()
    }
    return structure("Sequences")(
        **strided, sums=sums.data_ptr(), scratch=scratch.data_ptr(), documents=spans.data_ptr(), count=len(spans),
        length=q.shape[1], keys=0 if past is None else k.shape[1], past=past or 0, heads=q.shape[2],
        key_heads=k.shape[2], width=q.shape[3], value_width=v.shape[3],
        pairs=compat.cpu_multiplies(q.dtype), **fields,
    )  # fmt: skip
