"""Order: a shuffle that gives the number at any index, without memory.

A Feistel network is a bijection on the numbers of 2h bits, whatever its round function. Walking its cycle until the
number falls below `size` makes it a bijection on range(size) (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). Reproducing a run depends on the order: it must never change, on any machine, in any version (tests hold
golden values).
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


def permute(indices: NDArray[np.integer], size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return items `indices`, [N] of int64, of the shuffle of range(size). Raises ValueError outside that range."""
    values = np.asarray(indices).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"indices must lie in range({size}), found {values.min()} to {values.max()}")
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    images = _feistel(values.astype(np.uint64), half, keys)
    while (outside := images >= np.uint64(size)).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def shuffle_rows(cursor: int, count: int, size: int, seed: int | None) -> NDArray[np.int64]:
    """Return items [cursor, cursor + count) of endless epochs of range(size), each shuffled anew. None = in order."""
    epochs, numbers = np.divmod(np.arange(cursor, cursor + count, dtype=np.int64), size)
    if seed is not None:
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            numbers[in_epoch] = permute(numbers[in_epoch], size, seed=seed, epoch=int(epoch))
    return numbers


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.uint64(key) for key in np.frombuffer(digest, dtype="<u8"))


def _feistel(values: NDArray[np.uint64], half: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << bits | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014). Products wrap at 2**64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
