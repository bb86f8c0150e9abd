"""What a run carries on: names, values that are JSON, and a round trip that keeps every bit."""

import json
import random

import numpy as np
import pytest
import torch

from meshwright.parallel import on_one_device
from meshwright.spec import parameters
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import LossScaler
from meshwright.training.step.state import NoiseScale, Progress, TrainState, seed_everything
from meshwright.training.step.step import train_step
from tests.training.tiny import RECIPE, batch, small

CPU = torch.device("cpu")


def state(name: str = "deepseek-v3", *, dtype: torch.dtype = torch.float32, seed: int = 0) -> TrainState:
    model = small(name, dtype=dtype, seed=seed)
    scaler = LossScaler(CPU, initial=1024.0) if dtype == torch.float16 else None
    return TrainState(on_one_device(model), Optimizer(model.named_parameters(), RECIPE), scaler, Progress())


def step(trained: TrainState, seed: int) -> None:
    train_step(
        trained.engine, trained.optimizer, [batch(2, 8, seed=seed)],
        rate=1e-3, clip=1.0, balance_loss=0.01, scaler=trained.scaler,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_names(dtype: torch.dtype) -> None:
    fresh = state(dtype=dtype)
    weights = [parameter.name for parameter in parameters(fresh.engine.model.shape)]
    buffers = [f"layers.{layer}.mlp.router.correction_bias" for layer in (1, 2)]
    kinds = ["moment1.", "moment2.", "step."] + ([] if dtype == torch.float32 else ["master."])
    expected = {f"model.{name}" for name in (*weights, *buffers)} | {
        f"optimizer.{k}{n}" for k in kinds for n in weights
    }
    expected |= {"scaler.scale", "scaler.good_steps"} if dtype == torch.float16 else set()
    names = {name for name in fresh.tensors() if not name.startswith("rng.")}
    assert names == expected
    assert {name for name in fresh.tensors() if name.startswith("rng.0.")} >= {
        "rng.0.python",
        "rng.0.numpy",
        "rng.0.torch",
    }


def test_the_tensors_are_those_in_use() -> None:
    fresh = state()
    assert fresh.tensors()["model.embed.weight"].data_ptr() == fresh.engine.model.embed.weight.data_ptr()
    assert not any(tensor.requires_grad for name, tensor in fresh.tensors().items() if name.startswith("model."))


def progress() -> Progress:
    noise = NoiseScale(2.0, 0.5, 0.1)
    return Progress(
        step=3, cursor=12, tokens=96, seconds=1.5, noise=noise, eval_loss=3.0, best_eval_loss=2.5, best_step=2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_round_trip_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    seed_everything(3)
    first = state(dtype=dtype)
    for seed in range(3):
        step(first, seed)
    first.progress = progress()
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    values = json.loads(json.dumps(first.values(RECIPE, "text", "tokenizer"), allow_nan=False))
    step(first, 3)
    drawn = (random.random(), np.random.rand(), torch.rand(3))

    seed_everything(99)
    second = state(dtype=dtype, seed=1)
    tensors = second.tensors()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    second.restore(tensors, values)
    assert second.progress == progress()
    step(second, 3)
    assert drawn[:2] == (random.random(), np.random.rand()) and torch.equal(drawn[2], torch.rand(3))
    for name, tensor in first.tensors().items():
        if not name.startswith("rng."):
            assert torch.equal(tensor, second.tensors()[name]), name


def test_seeds() -> None:
    draws = []
    for seed in (5, 5, 6, 2**63 - 1):
        seed_everything(seed)
        draws.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    assert draws[0] == draws[1] and len(set(draws)) == 3
