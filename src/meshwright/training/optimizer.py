"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decay groups, master weights, one fused pass.

The update is one pass over the matrices and one over the vectors (kernels/wide_states.py). Below fp32 it runs on fp32
master weights: 2 + 2 + 4 + 4 + 4 bytes a parameter. On a GPU a Triton kernel reads gradients of any dtype. Elsewhere
torch's fused kernel, which takes fp32, is given those of 16 bit widened in buckets, so that few are ever there twice.
Of sharded parameters this rank's part is updated, as plain tensors that share the part's memory.

Moments that are narrower than fp32, and bf16 weights without masters, are training/narrow_moments.py. With
recipe.optimizer=muon hidden matrices go by training/muon.py, and only the rest by AdamW.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.triton.narrow_piece import UpdateNumbers
from meshwright.kernels.wide_states import WideStates, adamw, adamw_reference, in_one_pass
from meshwright.parallel import Engine
from meshwright.parallel.data import local
from meshwright.spec.boxes import Box
from meshwright.spec.inventory import parameters as inventory
from meshwright.spec.optimizer_states import FP32_STATES, MomentFormat
from meshwright.spec.recipe import Recipe
from meshwright.training.muon import MatrixUpdate, Muon, StepNumbers, muon_of
from meshwright.training.narrow_moments import Held, NarrowStates

BUCKET_BYTES = 16 * 2**20
"""What widened gradients may take beyond the 16-bit ones that they replace; and narrow states beside themselves."""


@dataclass(frozen=True, slots=True)
class _ParameterGroup:
    """Some parameters of one weight decay, as lists that the kernel takes."""

    names: list[str]
    decay: float
    states: WideStates


class Optimizer:
    """Updates named parameters from their gradients, hidden matrices by Muon where the recipe says so. Matrices decay;
    norms and biases do not. What does not require a gradient is passed over and has no state."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe, held: Mapping[str, Held] | None = None,
        prefer: str = "auto", muon: Muon | None = None, gathered: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """`held`: of each parameter, where the recipe's states are not all AdamW's in fp32 (`of` knows it). `prefer`:
        one of chooser.PREFERENCES, for their kernel. `muon`: what updates the matrices that have one moment.
        `gathered`: Engine.gathered_dtype."""
        known = dict(parameters)
        self.parameters = {name: parameter for name, parameter in known.items() if parameter.requires_grad}
        self.frozen = tuple(parameter for parameter in known.values() if not parameter.requires_grad)
        self.recipe, storage = recipe, recipe.storage
        assert held is not None or storage == FP32_STATES, "other states go by a parameter's place: Optimizer.of"
        own = {name: local(parameter.detach()) for name, parameter in self.parameters.items()}
        self.masters = {name: x.float() for name, x in own.items() if storage.masters or x.dtype == torch.float32}
        self.gathered, self.prefer = gathered, prefer
        self.widened = any(parameter.dtype != torch.float32 for parameter in self.parameters.values())
        # Made now, below everything that comes and goes in a step, they leave no holes in memory.
        self._steps = {name: torch.zeros((), device=x.device) for name, x in own.items()}
        apart = {name: held[name] for name in own if held and not _plain(held[name], name in self.masters)}
        self._narrow = NarrowStates(apart, recipe.seed, next(iter(own.values())).device, prefer) if apart else None
        self._muon, self._matrices = muon, {name for name, one in apart.items() if one.stored.moments == 1}
        wide = {name: x for name, x in self.masters.items() if name not in apart}
        self._moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in wide.items()}
        self._groups: dict[tuple[str, ...], list[_ParameterGroup]] = {}

    @classmethod
    def of(cls, engine: Engine, recipe: Recipe) -> Self:
        """Over all parameters of a laid-out model."""
        known = {one.name: one for one in inventory(engine.model.shape)}
        held = {name: Held(box, recipe.storage.format_of(known[name])) for name, box in engine.local_boxes().items()}
        muon = muon_of(engine, recipe) if recipe.optimizer == "muon" else None
        prefer = engine.model.kernels.prefer
        return cls(engine.parameters.items(), recipe, held, prefer, muon, engine.gathered_dtype)

    def step(self, rate: float, *, divide_by: Tensor, skip: Tensor) -> None:
        """One update. Gradients are divided by `divide_by` () fp32 inside the fused pass (clipping and loss scale in
        one); nothing changes where `skip` () is 1.0. Below fp32 each gradient is dropped as soon as it is widened."""
        counts = 1 - skip
        with torch.no_grad():
            at_once = in_one_pass(list(self.masters.values()), self.prefer)
            for names in [self._ready()] if at_once else self.buckets():
                gradients = self._taken_gradients(names) if at_once else self._widened_gradients(names)
                for group in self._grouped(names):
                    compat.add_to_each(group.states.steps, counts)
                    (adamw if at_once else adamw_reference)(
                        group.states,
                        [gradients[name] for name in group.names],
                        [local(self.parameters[name].detach()) for name in group.names],
                        self._numbers(rate, group.decay, divide_by, skip),
                    )
                del gradients  # before the next bucket is widened
            self._update_narrow(rate, divide_by, skip, counts)
            if self._muon is not None:
                self._update_matrices(self._muon, StepNumbers.of(self.recipe, rate, divide_by, skip))

    def _numbers(self, rate: float, decay: float, divide_by: Tensor, skip: Tensor) -> UpdateNumbers:
        recipe = self.recipe
        return UpdateNumbers(
            rate=rate, beta1=recipe.beta1, beta2=recipe.beta2, epsilon=recipe.epsilon, decay=decay,
            divide_by=divide_by, skip=skip,
        )  # fmt: skip

    def _update_narrow(self, rate: float, divide_by: Tensor, skip: Tensor, counts: Tensor) -> None:
        """What the fused kernel cannot read: parameter by parameter, each gradient dropped below fp32."""
        states = self._narrow
        if states is None:
            return
        some = states.moments.keys() - self._matrices
        ready = {n: p for n, p in self.parameters.items() if n in some and p.grad is not None}
        if ready:
            compat.add_to_each([self._steps[name] for name in ready], counts)
        for name, parameter in ready.items():
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            numbers = self._numbers(rate, self.recipe.weight_decay if gradient.dim() > 1 else 0.0, divide_by, skip)
            states.update(name, self._weights(name), gradient, self._steps[name], numbers, BUCKET_BYTES)
            if self.widened:
                del gradient
                parameter.grad = None

    def _weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        """(the weight that is updated, its 16-bit copy where that is a master)."""
        weight = local(self.parameters[name].detach())
        master = self.masters.get(name, weight)
        return master, weight if master.dtype != weight.dtype else None

    def _update_matrices(self, muon: Muon, numbers: StepNumbers) -> None:
        """Those of this rank, with the other ranks of its stage: one that found no gradient takes part with 0. Their
        memory is that of the gradients, which below fp32 are dropped behind them."""
        states, found = self._narrow, dict[str, MatrixUpdate]()
        steps = [self._steps[name] for name in self.parameters if name in self._matrices]
        if steps:
            compat.add_to_each(steps, numbers.keep)
        for name, parameter in self.parameters.items():
            weights = self._weights(name)
            if name not in self._matrices or not weights[0].numel():
                continue
            assert states is not None
            gradient = torch.zeros_like(weights[0]) if parameter.grad is None else local(parameter.grad)
            piece = states.piece(name, weights, self._steps[name])
            found[name] = MatrixUpdate(piece, muon.direction(piece, gradient, numbers))
            if self.widened:
                del gradient
                parameter.grad = None
        muon.update(found, numbers)

    def buckets(self) -> Iterator[tuple[str, ...]]:
        """The parameters that have a gradient, in the runs in which they are updated: fp32 gradients all at once, then
        those of 16 bit, the small ones first.

        A run is as large as BUCKET_BYTES and what earlier runs gave back. A gradient that is a piece of a larger buffer
        gives nothing back.
        """
        wide = {name: self.parameters[name] for name in self._moments}
        found = {name: local(p.grad) for name, p in wide.items() if p.grad is not None}
        ready = tuple(name for name, gradient in found.items() if gradient.dtype == torch.float32)
        if ready:
            yield ready
        sizes = {name: (4 * g.numel(), _alone(g)) for name, g in found.items() if g.dtype != torch.float32}
        del found
        run: list[str] = []
        room, filled, given_back = BUCKET_BYTES, 0, 0
        for name in sorted(sizes, key=lambda name: sizes[name][0]):
            size, alone = sizes[name]
            if run and filled + size > room:
                yield tuple(run)
                room, run, filled, given_back = room + given_back, [], 0, 0
            run.append(name)
            filled += size
            given_back += (
                size if alone else 0
            )  # half of it: 16 bit. It is also half of a later run that takes its place
        if run:
            yield tuple(run)

    def _ready(self) -> tuple[str, ...]:
        """Parameters of fp32 states that have a gradient."""
        return tuple(name for name in self._moments if self.parameters[name].grad is not None)

    def _taken_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """As they are, by name; below fp32 the parameters lose theirs."""
        found = {}
        for name in names:
            parameter = self.parameters[name]
            assert parameter.grad is not None
            found[name] = local(parameter.grad)
            if self.widened:
                parameter.grad = None
        return found

    def _widened_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The same in fp32, each dropped as soon as it is widened."""
        return {name: self._taken_gradients((name,))[name].float() for name in names}

    def _grouped(self, names: tuple[str, ...]) -> list[_ParameterGroup]:
        """The lists of some parameters, made once; they are the same in nearly every step."""
        if names not in self._groups:
            matrices = [name for name in names if self.masters[name].dim() > 1]
            vectors = [name for name in names if self.masters[name].dim() <= 1]
            given = ((matrices, self.recipe.weight_decay), (vectors, 0.0))
            self._groups[names] = [self._group(some, decay) for some, decay in given if some]
        return self._groups[names]

    def _group(self, names: list[str], decay: float) -> _ParameterGroup:
        first, second = ([self._moments[name][place] for name in names] for place in (0, 1))
        masters, steps = ([kind[name] for name in names] for kind in (self.masters, self._steps))
        return _ParameterGroup(names, decay, WideStates(masters, (first, second), steps))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state by name: `master.NAME` (below fp32), `moment1.NAME`, `moment2.NAME` (AdamW), `step.NAME`; of 8-bit
        moments also `moment1_scale.NAME` and `moment2_scale.NAME`."""
        found: dict[str, Tensor] = {}
        for name in self.parameters:
            if (self.widened or self.gathered) and name in self.masters:
                found["master." + name] = self.masters[name]
            if self._narrow is not None and name in self._narrow.moments:
                found |= self._narrow.tensors(name)
            else:
                found["moment1." + name], found["moment2." + name] = self._moments[name]
            found["step." + name] = self._steps[name]
        return found

    def box(self, state: str, box: Box) -> Box:
        """Of a tensor of the state by its name, where this rank has `box` of the parameter."""
        kind, _, name = state.partition(".")
        return self._narrow.held[name].stored.box(kind, box) if self._narrow and name in self._narrow.held else box

    def read_masters(self) -> None:
        """Take the master weights from the parameters anew (after weights were loaded without optimizer state)."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if self.widened:
                    master.copy_(local(self.parameters[name].detach()))


def _alone(gradient: Tensor) -> bool:
    """Whether its memory is its own, and free once it is dropped."""
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()


def _plain(held: Held, has_master: bool) -> bool:
    """Whether AdamW's fused kernel updates it."""
    return held.stored == MomentFormat(dtype="fp32") and has_master
