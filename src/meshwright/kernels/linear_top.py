"""Head and the likeliest tokens in one, without the whole logits: what is kept of a teacher.

Letters: N rows, R rows of a chunk, D width, V vocabulary, K likeliest tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.cross_entropy import Vocabulary, chunk_rows
from meshwright.kernels.divergence_rows import LEAST_LOG, KnownTop
from meshwright.kernels.head_matrix import HeadMatrix
from meshwright.kernels.linear import product_dtype
from meshwright.kernels.target import kind
from meshwright.spec.purpose import takes


@takes("logits")
def linear_top_reference(x: Tensor, weight: Tensor, number: int, temperature: float = 1.0) -> KnownTop:
    """Return the `number` likeliest tokens of each row of softmax(x W^T / T), at most V.

    Their ids (N, K) int64, and log-probabilities (N, K + 1) fp32 with that of all others together. x (N, D), weight (V,
    D).
    """
    logs = (F.linear(x, weight).float() / temperature).log_softmax(-1)
    largest, ids = logs.topk(min(number, len(weight)))
    rest = logs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return KnownTop(ids, torch.cat((largest, rest), 1).clamp(min=LEAST_LOG))


@takes("logits")
@torch.no_grad()
def linear_top(
    x: Tensor, weight: Tensor, number: int, temperature: float = 1.0, vocabulary: Vocabulary | None = None
) -> KnownTop:  # fmt: skip
    """Compute as the reference does, chunk by chunk and without a gradient.

    With a vocabulary, `weight` is a part of the head, and every part gets the tokens of the whole vocabulary.
    """
    most, head = vocabulary.most if vocabulary else len(weight), HeadMatrix.padded(weight, product_dtype(weight))
    rows = chunk_rows(len(x), 2 * most, kind(x))
    tops = []
    for start in range(0, len(x), rows):
        part = x[start : start + rows].to(product_dtype(weight))
        tops.append(_top_of_logits(head.logits(part).float().div_(temperature), number, vocabulary))
    if not tops:
        tops = [KnownTop(x.new_zeros((0, number), dtype=torch.int64), x.new_zeros((0, number + 1)).float())]
    return KnownTop(*(torch.cat(parts) for parts in zip(*tops, strict=True)))


def _top_of_logits(logits: Tensor, number: int, parts: Vocabulary | None) -> KnownTop:
    """Find the likeliest tokens of logits (R, V) fp32, which are overwritten. Parts need three reductions."""
    whole = parts.whole if parts else logits.shape[1]
    values, ids = logits.topk(min(number, logits.shape[1]))
    if parts is not None:
        values, ids = _gathered(values, ids, min(number, whole), parts)
    peak = values[:, :1]
    logits.sub_(peak).exp_()
    total = logits.sum(1)
    first, last = (parts.first, parts.first + parts.number) if parts else (0, whole)
    mine = (ids >= first) & (ids < last)
    columns = (ids - first).clamp(0, logits.shape[1] - 1)
    rest = logits.scatter_add_(1, columns, -logits.gather(1, columns) * mine).sum(1)  # exactly 0 there
    both = torch.stack((total, rest))
    total, rest = (parts.total(both) if parts else both).unbind(0)
    logs = torch.cat((values - peak, rest.log().unsqueeze(1)), 1) - total.log().unsqueeze(1)
    return KnownTop(ids, logs.clamp(min=LEAST_LOG))


def _gathered(values: Tensor, ids: Tensor, number: int, parts: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the largest values of all parts and their ids.

    Each part fills its columns of a table, which is summed. fp64 holds every id.
    """
    table = values.new_zeros((2, len(values), parts.parts, number), dtype=torch.float64)
    here = values.shape[1]
    table[0, :, parts.index].fill_(-torch.inf)
    table[0, :, parts.index, :here], table[1, :, parts.index, :here] = values.double(), (ids + parts.first).double()
    table = parts.total(table).flatten(2)
    largest, columns = table[0].topk(number)
    return largest.float(), table[1].gather(1, columns).long()
