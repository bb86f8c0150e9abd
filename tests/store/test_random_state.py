"""What is drawn after a resume is what would have been drawn."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.store import checkpoint
from meshwright.store.checkpoint import rng_state, set_rng_state


def draws() -> list[float]:
    actual = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*actual, *torch.randn(5).tolist(), float(torch.rand(())), *np.random.randint(0, 9, 3).tolist()]


@pytest.mark.parametrize("spare", [False, True], ids=["as seeded", "with a spare normal number"])
def test_all_generators_go_on_after_a_checkpoint(tmp_path: Path, spare: bool) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    if spare:  # both generators make normal numbers in pairs and hold the second back
        random.gauss(0, 1)
        np.random.randn()
    tensors, values = rng_state()
    path = checkpoint.save(tmp_path, step=1, tensors=tensors, values={"random": values}, score=None, keep_last=1)
    expected = [draws(), draws()]
    fresh, _ = rng_state()
    values = checkpoint.load(path, fresh)
    set_rng_state(fresh, values["random"])
    assert [draws(), draws()] == expected


def test_a_run_may_go_on_with_other_devices(tmp_path: Path) -> None:
    """A generator of a device that is gone is passed over, one that is new keeps its state."""
    tensors = rng_state()[0] | {"rng.0.cuda7": torch.arange(16, dtype=torch.uint8), "w": torch.ones(2)}
    path = checkpoint.save(tmp_path, step=1, tensors=tensors, values={}, score=None, keep_last=1)
    fresh = rng_state()[0] | {"rng.0.other": torch.full((3,), 5), "w": torch.zeros(2)}
    checkpoint.load(path, fresh)
    assert fresh["w"].tolist() == [1, 1] and fresh["rng.0.other"].tolist() == [5, 5, 5]
    set_rng_state(fresh | {"rng.0.cuda7": torch.arange(16, dtype=torch.uint8)}, {})


def test_each_rank_has_its_own_names() -> None:
    assert not rng_state(0)[0].keys() & rng_state(1)[0].keys()
    tensors, values = rng_state(1)
    torch.manual_seed(77)
    state = torch.get_rng_state()
    set_rng_state(tensors, values, rank=0)
    assert torch.equal(torch.get_rng_state(), state), "the state of rank 1 is not that of rank 0"
    set_rng_state(tensors, values, rank=1)
    assert not torch.equal(torch.get_rng_state(), state)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'PCG64'"):
        set_rng_state({}, {"rng": "PCG64"})


def test_of_gpus_only_the_one_in_use_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever number it has: another run of the rank may see its GPU under another one."""
    states = {0: torch.zeros(16, dtype=torch.uint8), 3: torch.arange(16, dtype=torch.uint8)}
    current = [3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [states.get(i, states[0]) for i in range(4)])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *device: states[current[0]])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, *device: states.update({device[0] if device else current[0]: state})
    )
    tensors, values = rng_state()
    assert [name for name in tensors if "cuda" in name] == ["rng.0.cuda"]
    current[0] = 0
    set_rng_state(tensors, values)
    assert torch.equal(states[0], torch.arange(16, dtype=torch.uint8))


@pytest.mark.gpu
def test_gpu_generators_go_on(tmp_path: Path) -> None:
    torch.cuda.manual_seed_all(5)
    torch.randn(3, device="cuda")
    tensors, values = rng_state()
    path = checkpoint.save(tmp_path, step=1, tensors=tensors, values=values, score=None, keep_last=1)
    expected = torch.randn(4, device="cuda")
    fresh, _ = rng_state()
    set_rng_state(fresh, checkpoint.load(path, fresh))
    assert torch.equal(torch.randn(4, device="cuda"), expected)
