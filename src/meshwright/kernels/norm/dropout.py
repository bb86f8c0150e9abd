"""Dropout whose masks every layout draws alike (Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html).

No generator has a state. Whether an element is dropped is a function of integers that do not depend on ranks:

    token key    hash of (seed, sample of the run, position in its row)      made with the batch, int32
    row key      hash of (token key, layer, site in the layer, head)
    element      hash of (row key + hash of the feature, or of the key's position)

So one device, every layout, a recomputation and a resumed run draw the same mask, and nothing has to be saved for it.
The hash is lowbias32 (github.com/skeeto/hash-prospector): two rounds of shift and multiply, in int32 that wraps. All of
it is plain integer arithmetic, which every device computes alike and the compiler fuses.

Letters: B batch, S sequence, H heads, R rows, C columns.
"""

import hashlib
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.chooser import device_kind

WORD = 2**32
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Factors of lowbias32."""
GOLDEN = 0x9E3779B9
"""Step between numbers that are hashed: 2^32 over the golden ratio."""
AT_ONCE = {"cpu": 2**18, "cuda": 2**23}
"""Elements of a mask that are hashed at a time: on a CPU, as many int32 as stay in its second-level cache."""


def signed(number: int) -> int:
    """Return the int32 with the same low 32 bits."""
    return (number + WORD // 2) % WORD - WORD // 2


def site_key(name: str) -> int:
    """Return the number of a place of dropout in a layer, as an int32."""
    return signed(zlib.crc32(name.encode()))


WEIGHTS_SITE = site_key("attention weights")
"""Number of attention's weights. A constant, since the compiler cannot trace the hash of a name."""


def mix(x: Tensor) -> Tensor:
    """Hash int32 numbers, each to another one."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * signed(SECOND)
    return x ^ ((x >> 16) & 0xFFFF)


def token_keys(seed: int, samples: range, positions: Tensor) -> Tensor:
    """Return the keys (B, S) int32 of positions (S,) in the rows of numbered samples, on the host."""
    # 64 bits of (seed, sample), so that no two samples of a run share all their keys.
    digests = [hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest() for sample in samples]
    words = [[int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:])] for digest in digests]
    low, high = torch.tensor(words, dtype=torch.int32, device="cpu").view(-1, 2, 1).unbind(1)
    return mix(mix(column_keys(positions) + low) ^ high)


class TokenKeys(NamedTuple):
    """Keys of the tokens that a rank computes with, for a model, or for one of its layers."""

    tokens: Tensor
    """(B, S) int32: positions that attention and matrices with adapters see."""
    stream: Tensor
    """(B, S or S / t) int32: positions of the residual stream, which sequence parallelism cuts."""

    def of_layer(self, layer: str) -> "TokenKeys":
        """Return the keys of a layer, named as in the whole model."""
        tokens = mix(self.tokens + site_key(layer))
        return TokenKeys(tokens, tokens if self.stream is self.tokens else mix(self.stream + site_key(layer)))


class AttentionDropout(NamedTuple):
    """Dropout of attention's weights."""

    rate: float
    rows: Tensor
    """Keys of queries and heads, (B, S, H) int32."""

    @staticmethod
    def make(tokens: Tensor, rate: float, heads: int, first: int) -> "AttentionDropout":
        """Return it for `heads` query heads from `first` on, and keys of tokens (B, S)."""
        numbers = features(first, heads, tokens.device)
        return AttentionDropout(rate, mix(tokens.unsqueeze(-1) + WEIGHTS_SITE + numbers))

    @property
    def growth(self) -> float:
        """Factor of the weights that stay."""
        return 1 / (1 - self.rate)


def dropout(x: Tensor, rate: float, rows: Tensor | None, site: int, first: int = 0) -> Tensor:
    """Drop a share of the elements of x (..., C), and divide the others by the rest.

    The backward pass needs a mask of one byte per element.

    Args:
        rows: Keys of the rows, (...) int32.
        site: Number of the place in the layer (`site_key`).
        first: Number of the first feature, where ranks hold parts of them.
    """
    assert rows is not None, "a model in training makes its keys of dropout (Transformer.keys)"
    mask = keep_mask(mix(rows + site), features(first, x.shape[-1], x.device), rate)
    return (x * mask).mul_(1 / (1 - rate))


def draw_token_keys(tokens: Tensor) -> Tensor:
    """Draw keys for tokens (B, S) from torch's generator, for a model that is called outside of a run."""
    return torch.randint_like(tokens, -(2**31), 2**31, dtype=torch.int64).to(torch.int32)


def column_keys(columns: Tensor) -> Tensor:
    """Return the keys of features, of heads, or of positions as attention's columns, from their numbers (C,)."""
    return mix((columns * GOLDEN).to(torch.int32))


def features(first: int, number: int, device: torch.device) -> Tensor:
    """Return the keys of `number` features from `first` on."""
    return column_keys(torch.arange(first, first + number, device=device))


def keep_mask(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return which elements stay, bool (..., R, C), for keys of rows (..., R) and columns (C,)."""
    if torch.compiler.is_compiling():
        return _keep_part(rows, columns, rate)
    flat = rows.reshape(-1)
    at_once = max(1, AT_ONCE["cpu" if device_kind(rows) == "cpu" else "cuda"] // len(columns))
    if len(flat) <= at_once:
        return _keep_part(rows, columns, rate)
    # In parts, so that memory for the hashes is small and, on a CPU, in its cache.
    mask = torch.empty(len(flat), len(columns), dtype=torch.bool, device=rows.device)
    for part, into in zip(flat.split(at_once), mask.split(at_once), strict=True):
        into.copy_(_keep_part(part, columns, rate))
    return mask.view(*rows.shape, len(columns))


def _keep_part(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    x = rows.unsqueeze(-1) + columns
    # The last step of `mix` changes low bits alone, which hardly matter in the comparison.
    if torch.compiler.is_compiling():
        x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
        x = (x ^ ((x >> 15) & 0x1FFFF)) * signed(SECOND)
    else:
        high = (x >> 16).bitwise_and_(0xFFFF)
        x.bitwise_xor_(high).mul_(FIRST)
        torch.bitwise_right_shift(x, 15, out=high)
        x.bitwise_xor_(high.bitwise_and_(0x1FFFF)).mul_(signed(SECOND))
    return x >= round(rate * WORD) - WORD // 2
