"""All random states of a process as plain tensors, so that a resumed run draws the same numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PREFIX = "rng."
"""Prefix of random states in a checkpoint. A run resumed on other devices loads those that exist."""
_KIND = "MT19937"


def rng_state(rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, values): the states of Python's `random`, numpy, torch and the current CUDA device.

    Tensors are named rng.RANK.NAME, so that ranks do not overwrite each other. The device has no number in the name:
    which GPUs a process sees, and in what order, may change between runs. Generator objects are not included.
    """
    # Each is 627 numbers: words, position, whether a spare normal number exists, and that number. float64 holds 32-bit
    # integers exactly.
    _, words, spare = random.getstate()
    python = torch.tensor([*words, spare is not None, spare or 0.0], dtype=torch.float64)
    tensors = {"python": python, "numpy": _numpy_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return {f"{PREFIX}{rank}.{name}": state for name, state in tensors.items()}, {"rng": _KIND}


def set_rng_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any], rank: int = 0) -> None:
    """Restore the states from `rng_state`. Other names in `tensors` are ignored; a missing state stays unchanged."""
    if values.get("rng", _KIND) != _KIND:
        raise ValueError(f"random state of kind {values['rng']!r}, not {_KIND}")
    for name, state in tensors.items():
        owner, _, source = name.removeprefix(PREFIX).partition(".")
        if not name.startswith(PREFIX) or owner != str(rank):
            continue
        if source == "python":
            *words, has_spare, spare = state.tolist()
            random.setstate((3, tuple(int(word) for word in words), spare if has_spare else None))
        elif source == "numpy":
            *words, position, has_gauss, gauss = state.tolist()
            key = np.array(words, dtype=np.uint32)
            np.random.set_state((_KIND, key, int(position), int(has_gauss), gauss))
        elif source == "torch":
            torch.set_rng_state(state.cpu())
        elif source == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state.cpu())


def _numpy_state() -> Tensor:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != _KIND:
        raise ValueError(f"numpy's global generator is a {state['bit_generator']}, not the usual {_KIND}")
    inner = state["state"]
    return torch.tensor([*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]], dtype=torch.float64)
