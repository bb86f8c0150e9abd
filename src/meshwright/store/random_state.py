"""Every random state of a process as plain tensors: what is drawn after a resume is what would have been drawn."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PREFIX = "rng."
"""Names of random states in a checkpoint; a run resumed on other devices takes those that it finds."""
_KIND = "MT19937"


def rng_state(rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of Python's `random`, numpy, torch and the CUDA device that this process is on: (tensors, values).

    Tensors are named rng.RANK.NAME, so that ranks do not overwrite each other; values are the same on every rank. The
    device has no number: which GPUs a process sees, and in what order, may change from run to run.
    Sources of randomness that are objects of their own (a Generator, numpy's default_rng) are not in it.
    """
    tensors = {"python": _python_state(), "numpy": _numpy_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return {f"{PREFIX}{rank}.{name}": state for name, state in tensors.items()}, {"rng": _KIND}


def set_rng_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any], rank: int = 0) -> None:
    """Put back what `rng_state` gave; other names in `tensors` are passed over, missing ones leave a state as it is."""
    if values.get("rng", _KIND) != _KIND:
        raise ValueError(f"random state of kind {values['rng']!r}, not {_KIND}")
    for name, state in tensors.items():
        owner, _, source = name.removeprefix(PREFIX).partition(".")
        if not name.startswith(PREFIX) or owner != str(rank):
            continue
        if source == "python":
            _set_python_state(state)
        elif source == "numpy":
            _set_numpy_state(state)
        elif source == "torch":
            torch.set_rng_state(state.cpu())
        elif source == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state.cpu())


def _python_state() -> Tensor:
    """627 numbers as float64, which holds 32-bit integers exactly: words, position, has a spare normal number, it."""
    _, words, spare = random.getstate()
    return torch.tensor([*words, spare is not None, spare or 0.0], dtype=torch.float64)


def _set_python_state(state: Tensor) -> None:
    *words, has_spare, spare = state.tolist()
    random.setstate((3, tuple(int(word) for word in words), spare if has_spare else None))


def _numpy_state() -> Tensor:
    """627 numbers, laid out in the same way."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != _KIND:
        raise ValueError(f"numpy's global generator is a {state['bit_generator']}, not the usual {_KIND}")
    inner = state["state"]
    return torch.tensor([*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]], dtype=torch.float64)


def _set_numpy_state(state: Tensor) -> None:
    *words, position, has_gauss, gauss = state.tolist()
    np.random.set_state((_KIND, np.array(words, dtype=np.uint32), int(position), int(has_gauss), gauss))
