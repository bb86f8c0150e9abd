"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decay groups, master weights, one fused pass.

The update itself is torch's fused AdamW. Below fp32 it runs on fp32 master weights, bucket by bucket, so that only one
bucket of gradients is ever widened: 2 + 2 + 4 + 4 + 4 bytes a parameter and a bucket more. Gradients that were summed
in fp32 are taken as they are. Of sharded parameters it updates this rank's part, as plain tensors that share the part's
memory.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.parallel.data import local
from meshwright.spec.recipe import Recipe

BUCKET_BYTES = 16 * 2**20


class AdamW:
    """Updates named parameters from their gradients. Matrices decay; norms and biases do not."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe) -> None:
        self.parameters = dict(parameters)
        self.masters = {name: local(parameter.detach()).float() for name, parameter in self.parameters.items()}
        self.widened = any(parameter.dtype != torch.float32 for parameter in self.parameters.values())
        self.buckets = [(names, self._torch_optimizer(names, recipe)) for names in self._split()]
        self.tensors()  # made now, below everything that comes and goes in a step, they leave no holes in memory

    def _split(self) -> list[list[str]]:
        """Names in buckets of BUCKET_BYTES fp32 gradients; one bucket where nothing is widened.

        The largest come last: when they are widened, the gradients of the others are gone.
        """
        if not self.widened:
            return [list(self.masters)]
        buckets: list[list[str]] = [[]]
        filled = 0
        for name, master in sorted(self.masters.items(), key=lambda item: item[1].numel()):
            if buckets[-1] and filled + master.numel() * 4 > BUCKET_BYTES:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += master.numel() * 4
        return buckets

    def _torch_optimizer(self, names: list[str], recipe: Recipe) -> torch.optim.AdamW:
        decayed = [self.masters[n] for n in names if self.masters[n].dim() > 1]
        plain = [self.masters[n] for n in names if self.masters[n].dim() <= 1]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.epsilon,
            fused=True,
        )

    def step(self, rate: float, *, divide_by: Tensor, skip: Tensor) -> None:
        """One update. Gradients are divided by `divide_by` () fp32 inside the fused pass (clipping and loss scale in
        one); nothing changes where `skip` () is 1.0. Below fp32 each gradient is dropped as soon as it is widened."""
        with torch.no_grad():
            for names, inner in self.buckets:
                for group in inner.param_groups:
                    group["lr"] = rate
                inner.grad_scale, inner.found_inf = divide_by, skip  # type: ignore[attr-defined]
                self._widen(names)
                inner.step()
                self._narrow(names)

    def _widen(self, names: list[str]) -> None:
        for name in names:
            gradient = self.parameters[name].grad
            self.masters[name].grad = None if gradient is None else local(gradient).float()
            if self.widened:
                self.parameters[name].grad = None

    def _narrow(self, names: list[str]) -> None:
        for name in names:
            master = self.masters[name]
            master.grad = None
            if self.widened:
                local(self.parameters[name].detach()).copy_(master)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state by name: `master.NAME` (below fp32), `moment1.NAME`, `moment2.NAME`, `step.NAME`."""
        found: dict[str, Tensor] = {}
        for names, inner in self.buckets:
            for name in names:
                master = self.masters[name]
                if self.widened:
                    found["master." + name] = master
                state = inner.state[master]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                    state["exp_avg"] = torch.zeros_like(master)
                    state["exp_avg_sq"] = torch.zeros_like(master)
                found["moment1." + name], found["moment2." + name] = state["exp_avg"], state["exp_avg_sq"]
                found["step." + name] = state["step"]
        return found

    def read_masters(self) -> None:
        """Take the master weights from the parameters anew (after weights were loaded without optimizer state)."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if self.widened:
                    master.copy_(local(self.parameters[name].detach()))
