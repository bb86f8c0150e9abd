"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decay groups, master weights, one fused pass.

The update is one pass over the matrices and one over the vectors (kernels/optimizer/adamw.py). Below fp32 it runs on
fp32 master weights: 2 + 2 + 4 + 4 + 4 bytes per parameter. On a GPU a Triton kernel reads gradients of any dtype.
Elsewhere torch's fused kernel needs fp32, so 16-bit gradients are widened in buckets, few of which exist twice at any
time. Of sharded parameters only this rank's part is updated, as plain tensors that share the part's memory.

Parameters are updated one at a time (`NarrowStates`) if moments are not fp32, or if bf16 weights have no fp32 master
(spec/weights/boxes.py, kernels/optimizer/adamw.py). With recipe.optimizer=muon hidden matrices are updated by
training/optimizer/muon.py, in any format, and only the rest by AdamW.

`held_bytes` counts what engine and optimizer keep, by kind, from the tensors themselves.

The learning rate of a step is here too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self
from zlib import crc32

import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.optimizer.adamw import WideStates, adamw, adamw_reference, in_one_pass, narrow_adamw
from meshwright.kernels.triton.narrow_piece import Moment, NarrowPiece, PositionInWhole, UpdateNumbers, code_books
from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel import Engine
from meshwright.parallel.axes.data import local
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.weights.boxes import FP32_STATES, WORK_BYTES, Box, MomentFormat
from meshwright.spec.weights.inventory import parameters as inventory
from meshwright.training.optimizer.muon import MatrixUpdate, Muon, StepNumbers, build_muon

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
ZERO_CODE = {True: 127, False: 0}
"""Index of 0 in the code book, signed and unsigned."""


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's box of a parameter, and the format of its moments."""

    box: Box
    stored: MomentFormat


class NarrowStates:
    """Moments by parameter name, and their update."""

    def __init__(self, held: dict[str, Held], seed: int, device: torch.device, prefer: str = "auto") -> None:
        """Take `prefer` from chooser.PREFERENCES."""
        self.held, self.seed, self.prefer = held, seed, prefer
        self.books = code_books(device)
        self.moments = {name: _zero_moments(piece, device) for name, piece in held.items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return `moment1` and `moment2` in the sizes of the piece.

        8-bit moments add `moment1_scale` and `moment2_scale`.
        """
        tensors: dict[str, Tensor] = {}
        sizes, stored = self.held[name].box.sizes, self.held[name].stored
        for number, moment in enumerate(self.moments[name], start=1):
            tensors[f"moment{number}.{name}"] = moment.values.view(sizes)
            if moment.scales is not None:
                tensors[f"moment{number}_scale.{name}"] = moment.scales.view(stored.scale_sizes(sizes))
        return tensors

    def update(
        self,
        name: str,
        weights: tuple[Tensor, Tensor | None],
        gradient: Tensor,
        step: Tensor,
        numbers: UpdateNumbers,
        most_bytes: int,
    ) -> None:
        """Update one parameter in place. `weights`: the updated weight, and its 16-bit copy."""
        if weights[0].numel():
            piece = self.piece(name, weights, step)
            rows = gradient.reshape(piece.weight.shape)
            narrow_adamw(piece, rows, numbers, most_bytes // WORK_BYTES, self.prefer)

    def piece(self, name: str, weights: tuple[Tensor, Tensor | None], step: Tensor) -> NarrowPiece:
        """Return the local part of a non-empty parameter as rows."""
        weight, copy = weights
        size = (-1, weight.shape[-1])  # a vector is one row
        return NarrowPiece(
            weight=weight.view(size),
            copy=None if copy is None else copy.view(size),
            moments=self.moments[name],
            step=step,
            books=self.books,
            position=self._position_in_whole(name),
        )

    def _position_in_whole(self, name: str) -> PositionInWhole:
        """Return the seed and position that random bits depend on: no rank and no layout changes them."""
        box = self.held[name].box
        _, rows, _ = _pad_to_three(box.sizes)
        _, whole_rows, width = _pad_to_three(box.whole)
        first, second, column = _pad_to_three(box.offsets, 0)
        # Parameters must not share random bits, and a name is the same under every layout.
        seed = (crc32(name.encode()) + 2654435761 * self.seed) % 2**32
        return PositionInWhole(
            seed=seed, rows=max(1, rows), whole_rows=whole_rows, first=first, second=second, width=width, column=column
        )


def _pad_to_three(sizes: tuple[int, ...], filled: int = 1) -> tuple[int, int, int]:
    x, y, w = (filled,) * (3 - len(sizes)) + sizes
    return x, y, w


def _zero_moments(held: Held, device: torch.device) -> tuple[Moment, ...]:
    stored, sizes = held.stored, held.box.sizes
    width = sizes[-1]
    rows = held.box.numel // width if width else 0

    def zero_moment(signed: bool) -> Moment:
        if stored.dtype != "int8":
            return Moment(torch.zeros((rows, width), dtype=DTYPES[stored.dtype], device=device), None, signed)
        codes = torch.full((rows, width), ZERO_CODE[signed], dtype=torch.uint8, device=device)
        scales = torch.zeros((rows, stored.scale_sizes(sizes)[-1]), device=device)
        return Moment(codes, scales, signed, stored.block)

    # The mean of the gradient is signed; that of its square, which only AdamW has, is not.
    return tuple(zero_moment(signed) for signed in (True, False)[: stored.moments])


BUCKET_BYTES = 16 * 2**20
"""Extra memory of widened gradients beyond the 16-bit ones that they replace, and of narrow updates."""


@dataclass(frozen=True, slots=True)
class _ParameterGroup:
    """Parameters of one weight decay, as the lists that the kernel takes."""

    names: list[str]
    decay: float
    states: WideStates


class Optimizer:
    """Updates named parameters from their gradients, hidden matrices by Muon when the recipe says so.

    Matrices decay; norms and biases do not. Parameters that require no gradient are skipped and have no state.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe, held: Mapping[str, Held] | None = None,
        prefer: str = "auto", muon: Muon | None = None, gathered: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Create the states.

        Args:
            held: Box and format of each parameter. Needed unless all states are AdamW's in fp32; `for_engine` knows
            them.
            prefer: One of chooser.PREFERENCES, for the kernel.
            muon: Updater of the matrices that have one moment.
            gathered: Engine.gathered_dtype.
        """
        parameters_by_name = dict(parameters)
        self.parameters = {name: weight for name, weight in parameters_by_name.items() if weight.requires_grad}
        self.frozen = tuple(weight for weight in parameters_by_name.values() if not weight.requires_grad)
        self.recipe, storage = recipe, recipe.storage
        assert held is not None or storage == FP32_STATES, (
            "other states depend on a parameter's box: Optimizer.for_engine"
        )
        shards = {name: local(parameter.detach()) for name, parameter in self.parameters.items()}
        self.masters = {name: x.float() for name, x in shards.items() if storage.masters or x.dtype == torch.float32}
        self.gathered, self.prefer = gathered, prefer
        self.widened = any(parameter.dtype != torch.float32 for parameter in self.parameters.values())
        # Allocated before anything that comes and goes in a step, states leave no holes in memory.
        self._steps = {name: torch.zeros((), device=x.device) for name, x in shards.items()}
        apart = {name: held[name] for name in shards if held and not _is_wide(held[name], name in self.masters)}
        self._narrow = NarrowStates(apart, recipe.seed, next(iter(shards.values())).device, prefer) if apart else None
        self._muon, self._matrices = muon, {name for name, piece in apart.items() if piece.stored.moments == 1}
        wide = {name: x for name, x in self.masters.items() if name not in apart}
        self._moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in wide.items()}
        self._groups: dict[tuple[str, ...], list[_ParameterGroup]] = {}

    @classmethod
    def for_engine(cls, engine: Engine, recipe: Recipe) -> Self:
        """Create the optimizer of all parameters of a laid-out model."""
        entries = {parameter.name: parameter for parameter in inventory(engine.model.shape)}
        held = {name: Held(box, recipe.storage.format_of(entries[name])) for name, box in engine.local_boxes().items()}
        muon = build_muon(engine, recipe) if recipe.optimizer == "muon" else None
        prefer = engine.model.kernels.prefer
        return cls(engine.parameters.items(), recipe, held, prefer, muon, engine.gathered_dtype)

    def step(self, rate: float, *, divide_by: Tensor, skip: Tensor) -> None:
        """Make one update. Nothing changes when `skip` () is 1.0.

        Gradients are divided by `divide_by` () fp32 inside the fused pass, which covers clipping and loss scale. Below
        fp32 each gradient is dropped as soon as it is widened.
        """
        # A skipped step does not count for the bias correction either.
        counts = 1 - skip
        with torch.no_grad():
            # One kernel that reads gradients of any dtype, or fp32 buckets for torch's fused kernel.
            at_once = in_one_pass(list(self.masters.values()), self.prefer)
            ready = tuple(name for name in self._moments if self.parameters[name].grad is not None)
            for names in [ready] if at_once else self.buckets():
                gradients = self._take_gradients(names) if at_once else self._widen_gradients(names)
                for group in self._groups_of(names):
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
                self._update_matrices(self._muon, StepNumbers.for_step(self.recipe, rate, divide_by, skip))

    def _numbers(self, rate: float, decay: float, divide_by: Tensor, skip: Tensor) -> UpdateNumbers:
        recipe = self.recipe
        return UpdateNumbers(
            rate=rate, beta1=recipe.beta1, beta2=recipe.beta2, epsilon=recipe.epsilon, decay=decay,
            divide_by=divide_by, skip=skip,
        )  # fmt: skip

    def _update_narrow(self, rate: float, divide_by: Tensor, skip: Tensor, counts: Tensor) -> None:
        """Update what the fused kernel cannot read, one parameter at a time, dropping gradients below fp32."""
        states = self._narrow
        if states is None:
            return
        names = states.moments.keys() - self._matrices
        ready = {name: p for name, p in self.parameters.items() if name in names and p.grad is not None}
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
        """Return the updated weight, and its 16-bit copy when that weight is a master."""
        weight = local(self.parameters[name].detach())
        master = self.masters.get(name, weight)
        return master, weight if master.dtype != weight.dtype else None

    def _update_matrices(self, muon: Muon, numbers: StepNumbers) -> None:
        """Update this rank's matrices together with the other ranks of its stage.

        A rank without a gradient takes part with 0. Directions reuse the memory of the gradients, which are dropped
        below fp32.
        """
        states, updates = self._narrow, dict[str, MatrixUpdate]()
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
            updates[name] = MatrixUpdate(piece, muon.direction(piece, gradient, numbers))
            if self.widened:
                del gradient
                parameter.grad = None
        muon.update(updates, numbers)

    def buckets(self) -> Iterator[tuple[str, ...]]:
        """Yield the parameters with a gradient in the runs in which they are updated.

        All fp32 gradients come first, in one run, then 16-bit ones, the small ones first. A run is as large as
        BUCKET_BYTES plus what earlier runs freed. A gradient that is a piece of a larger buffer frees nothing.
        """
        wide = {name: self.parameters[name] for name in self._moments}
        gradients = {name: local(p.grad) for name, p in wide.items() if p.grad is not None}
        ready = tuple(name for name, gradient in gradients.items() if gradient.dtype == torch.float32)
        if ready:
            yield ready
        sizes = {
            name: (4 * g.numel(), g.untyped_storage().nbytes() == g.numel() * g.element_size())
            for name, g in gradients.items()
            if g.dtype != torch.float32
        }
        del gradients
        run: list[str] = []
        room, filled, freed = BUCKET_BYTES, 0, 0
        # Small ones first: what they free makes room for the large ones.
        for name in sorted(sizes, key=lambda name: sizes[name][0]):
            size, owns_memory = sizes[name]
            if run and filled + size > room:
                yield tuple(run)
                room, run, filled, freed = room + freed, [], 0, 0
            run.append(name)
            filled += size
            # A 16-bit gradient frees half of `size`, which also holds half of a later run.
            freed += size if owns_memory else 0
        if run:
            yield tuple(run)

    def _take_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return gradients by name. Below fp32 the parameters lose theirs."""
        gradients = {}
        for name in names:
            parameter = self.parameters[name]
            assert parameter.grad is not None
            gradients[name] = local(parameter.grad)
            if self.widened:
                parameter.grad = None
        return gradients

    def _widen_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return gradients in fp32, each dropped as soon as it is widened."""
        return {name: self._take_gradients((name,))[name].float() for name in names}

    def _groups_of(self, names: tuple[str, ...]) -> list[_ParameterGroup]:
        """Return the lists of these parameters, made once, since nearly every step has the same ones."""
        if names not in self._groups:
            matrices = [name for name in names if self.masters[name].dim() > 1]
            vectors = [name for name in names if self.masters[name].dim() <= 1]
            decays = ((matrices, self.recipe.weight_decay), (vectors, 0.0))
            self._groups[names] = [self._group(members, decay) for members, decay in decays if members]
        return self._groups[names]

    def _group(self, names: list[str], decay: float) -> _ParameterGroup:
        first, second = ([self._moments[name][number] for name in names] for number in (0, 1))
        masters, steps = ([kind[name] for name in names] for kind in (self.masters, self._steps))
        return _ParameterGroup(names, decay, WideStates(masters, (first, second), steps))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name: `master.NAME` (below fp32), `moment1.NAME`, `moment2.NAME` (AdamW), `step.NAME`.

        8-bit moments add `moment1_scale.NAME` and `moment2_scale.NAME`.
        """
        tensors: dict[str, Tensor] = {}
        for name in self.parameters:
            # Otherwise the master is the parameter itself, which is saved as such.
            if (self.widened or self.gathered) and name in self.masters:
                tensors["master." + name] = self.masters[name]
            if self._narrow is not None and name in self._narrow.moments:
                tensors |= self._narrow.tensors(name)
            else:
                tensors["moment1." + name], tensors["moment2." + name] = self._moments[name]
            tensors["step." + name] = self._steps[name]
        return tensors

    def box(self, state: str, box: Box) -> Box:
        """Return the box of a state tensor by its name, when this rank has `box` of the parameter."""
        kind, _, name = state.partition(".")
        return self._narrow.held[name].stored.box(kind, box) if self._narrow and name in self._narrow.held else box

    def read_masters(self) -> None:
        """Copy the parameters into the master weights, after weights were loaded without optimizer state."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if self.widened:
                    master.copy_(local(self.parameters[name].detach()))


def _is_wide(held: Held, has_master: bool) -> bool:
    """Return whether AdamW's fused kernel can update it."""
    return held.stored == MomentFormat(dtype="fp32") and has_master


def held_bytes(engine: Engine, optimizer: Optimizer, teacher: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes of each kind (spec.memory.held.STATES) at this moment, without empty kinds.

    Tensors that share memory count once. spec/memory/held.py computes the same from shape and layout alone. `teacher`:
    its parameters.
    """
    seen: set[int] = set()
    sizes = {kind: _storage_bytes(tensors, seen) for kind, tensors in tensors_by_kind(engine, optimizer).items()}
    sizes["parameters"] += _storage_bytes(teacher, seen)
    return {kind: size for kind, size in sizes.items() if size}


def tensors_by_kind(engine: Engine, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors of each kind (spec.memory.held.STATES) as they are now."""
    parameters, shards = engine.parameters.values(), optimizer.parameters.values()
    states = optimizer.tensors()
    return {
        "parameters": [*parameters, *frozen_code_tensors(engine)],
        "shards": [*shards, *optimizer.frozen],
        "gradients": [p.grad for p in (*parameters, *shards) if p.grad is not None],
        "masters": [t for name, t in states.items() if name.startswith("master.")],
        "moments": [t for name, t in states.items() if name.startswith("moment")],
        "counters": [t for name, t in states.items() if name.startswith("step.")],
    }


def frozen_code_tensors(engine: Engine) -> list[Tensor]:
    """Return the tensors of frozen matrices that are stored as codes and scales."""
    matrices = frozen_codes(engine.stages, engine.model.shape).values()
    return [tensor for matrix in matrices for tensor in (*matrix.buffers(), *matrix.parameters())]


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the size of the storages behind tensors that are not in `seen`. Padding is part of a storage."""
    total = 0
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        # Views of one buffer, and masters that are their parameters, share a storage.
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


_NO_JUMP = 0.01
"""Share of a rate by which two schedules may differ without a note."""


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 1 .. steps: linear warm-up, then the schedule down to min_learning_rate_ratio.

    cosine (Loshchilov and Hutter 2017) and linear fall over all steps after the warm-up. wsd (warm-up, stable, decay;
    Hu et al. 2024, arXiv:2404.06395) falls linearly over the last decay_steps.
    """
    if step <= recipe.rising_steps:
        return recipe.learning_rate * step / recipe.rising_steps
    return recipe.learning_rate * _share(recipe, step)


def _share(recipe: Recipe, step: int) -> float:
    floor = recipe.min_learning_rate_ratio
    if recipe.learning_rate_schedule == "constant":
        return 1.0
    first = recipe.rising_steps
    if recipe.learning_rate_schedule == "wsd":
        first = max(first, recipe.steps - (recipe.decay_steps or max(1, recipe.steps // 5)))
        if step <= first:
            return 1.0
    done = min(1.0, (step - first) / max(1, recipe.steps - first))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if recipe.learning_rate_schedule == "cosine" else 1 - done
    return floor + (1 - floor) * shape


def rate_jump(before: Recipe, now: Recipe, step: int) -> str | None:
    """Return a note when a run that resumes after `step` has another rate there than `before`. None = it does not."""
    if not 0 < step < now.steps:
        return None
    previous, current = learning_rate(before, min(step, before.steps)), learning_rate(now, step)
    if abs(current - previous) <= _NO_JUMP * max(current, previous):
        return None
    why = f"has {now.steps} steps, and had {before.steps}" if now.steps != before.steps else "is another"
    following = f"{learning_rate(now, step + 1):.3g} at step {step + 1}"
    return f"the learning rate goes from {previous:.3g} at step {step} to {following}: its schedule {why}"
