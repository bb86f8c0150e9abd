"""Host time of the optimizer's update for the parameter list of a 7B model.

    python -m benchmarks.update_host_time [--json]

Every tensor has eight elements, so that next to nothing is computed and what is left is the host's work. The buckets
are those of the real sizes. `before` is the loop that this replaced: one torch.optim.AdamW for each bucket of 16 MiB,
as in 052af3c. Both run turn by turn in one process. Figures are processor seconds of the process, the best of many.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.spec import Recipe, parameters, presets
from meshwright.training.optimizer import BUCKET_BYTES, Optimizer

MODEL = "llama-2-7b"
RECIPE = Recipe(precision="bf16")
ELEMENTS = 8


class Before:
    """The update of 052af3c: a torch.optim.AdamW for each bucket."""

    def __init__(self, named: dict[str, nn.Parameter], buckets: Sequence[Sequence[str]]) -> None:
        self.parameters = named
        self.masters = {name: parameter.detach().float() for name, parameter in named.items()}
        self.buckets = [(names, self._optimizer(names)) for names in buckets]

    def _optimizer(self, names: Sequence[str]) -> torch.optim.AdamW:
        decayed = [self.masters[n] for n in names if self.masters[n].dim() > 1]
        plain = [self.masters[n] for n in names if self.masters[n].dim() <= 1]
        groups = [{"params": decayed, "weight_decay": RECIPE.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=RECIPE.learning_rate,
            betas=(RECIPE.beta1, RECIPE.beta2),
            eps=RECIPE.epsilon,
            fused=True,
        )

    def step(self, rate: float, *, divide_by: Tensor, skip: Tensor) -> None:
        with torch.no_grad():
            for names, inner in self.buckets:
                for group in inner.param_groups:
                    group["lr"] = rate
                inner.grad_scale, inner.found_inf = divide_by, skip  # type: ignore[attr-defined]
                for name in names:
                    gradient = self.parameters[name].grad
                    self.masters[name].grad = None if gradient is None else gradient.float()
                    self.parameters[name].grad = None
                inner.step()
                for name in names:
                    self.masters[name].grad = None
                    self.parameters[name].detach().copy_(self.masters[name])


def old_buckets(sizes: dict[str, int]) -> list[list[str]]:
    """The real list of 16 MiB buckets: sizes in elements."""
    found: list[list[str]] = [[]]
    filled = 0
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if found[-1] and filled + size * 4 > BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size * 4
    return found


def new_buckets(named: dict[str, nn.Parameter], sizes: dict[str, int], dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Those of the real sizes, from gradients that take no memory."""
    with torch.device("meta"):
        real = {name: nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for name, size in sizes.items()}
        for name, parameter in real.items():
            parameter.grad_dtype = dtype
            parameter.grad = torch.empty(sizes[name], dtype=dtype)
        return list(Optimizer(real.items(), RECIPE).buckets())


def measured(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Milliseconds of host time, with gradients of this dtype."""
    shape = presets.model(MODEL)
    listed = {one.name: one.shape for one in parameters(shape)}
    sizes = {name: int(torch.Size(size).numel()) for name, size in listed.items()}

    def tiny() -> dict[str, nn.Parameter]:
        shapes = {name: (1, ELEMENTS) if len(size) > 1 else (ELEMENTS,) for name, size in listed.items()}
        return {name: nn.Parameter(torch.randn(size).to(torch.bfloat16)) for name, size in shapes.items()}

    ours, theirs = tiny(), tiny()
    after, before = Optimizer(ours.items(), RECIPE), Before(theirs, old_buckets(sizes))
    buckets = new_buckets(ours, sizes, dtype)
    after.buckets = lambda: iter(buckets)  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(rounds):
        for name, named, step in (("before", theirs, before.step), ("after", ours, after.step)):
            seconds[name].append(_timed(named, dtype, step))
    milliseconds = {name: min(found) * 1e3 for name, found in seconds.items()}
    return {
        "before_ms": milliseconds["before"],
        "after_ms": milliseconds["after"],
        "share": milliseconds["after"] / milliseconds["before"],
        "buckets_before": len(before.buckets),
        "buckets_after": len(buckets),
        "tensors": len(sizes),
    }


def _timed(named: dict[str, nn.Parameter], dtype: torch.dtype, step: Callable[..., None]) -> float:
    for parameter in named.values():
        parameter.grad_dtype = dtype
        parameter.grad = torch.ones_like(parameter, dtype=dtype)
    one, zero = torch.ones(()), torch.zeros(())
    began = time.process_time()
    step(1e-3, divide_by=one, skip=zero)
    return time.process_time() - began


def measure(rounds: int) -> dict[str, Any]:
    """Both kinds of gradients, and the larger of the two shares that are left."""
    rows = {"fp32_gradients": measured(torch.float32, rounds), "bf16_gradients": measured(torch.bfloat16, rounds)}
    return {
        "model": MODEL,
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        **rows,
        "share": max(row["share"] for row in rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.rounds)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for kind in ("fp32_gradients", "bf16_gradients"):
        row = found[kind]
        print(
            f"{kind.replace('_', ' ')}: {row['after_ms']:.2f} ms in {row['buckets_after']} buckets, before "
            f"{row['before_ms']:.2f} ms in {row['buckets_before']}: {100 * row['share']:.0f} %"
        )


if __name__ == "__main__":
    main()
