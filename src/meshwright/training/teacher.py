"""The teacher of a distillation: a frozen model beside the student, laid out over the same ranks.

It runs where the student's loss is made, without gradients: hidden states of both meet at their heads, and no logits
are ever whole. It has a traffic of its own, so that a run's counts are those of its student.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.kernels.linear_divergence import DistillationLoss, Divergence
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.kernels.weight_codes import quantize_matrix
from meshwright.model.hub import HubFolder
from meshwright.model.hub.weight_names import tensor_sizes
from meshwright.model.predictions import Predictions
from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel import Engine, Mesh, build_engine, make_mesh
from meshwright.parallel.agree import digest
from meshwright.parallel.data import local, take_codes
from meshwright.spec import Layout, ModelShape, Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.objective_rules import teacher_layout
from meshwright.spec.plan import RANDOM
from meshwright.store.base_weights import BaseFolder, open_weights
from meshwright.store.commit import NAME
from meshwright.store.model_weights import final_weights, locate
from meshwright.store.run_folder import RunFolder
from meshwright.training.batches import Batch
from meshwright.training.distillation import Distillation, form_of
from meshwright.training.kept_bytes import codes
from meshwright.training.precision import DTYPES
from meshwright.training.pretrained import means_the_same
from meshwright.training.staged_teacher import StagedTeacher
from meshwright.training.step import Objective

OTHERWISE = "or train without one, by recipe.objective=cross-entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFolder:
    """Where a teacher's weights are: a Hugging Face folder, or a run."""

    path: Path
    shape: ModelShape
    tokenizer: Path | None
    base: BaseFolder | None
    """None: it is a run."""

    @property
    def hub(self) -> HubFolder | None:
        """Of a Hugging Face folder what else it says."""
        return None if self.base is None else self.base.hub

    @property
    def codes(self) -> str:
        """As which `model.lora.base` its matrices are held there; empty = as numbers, or as codes of several kinds."""
        return "" if self.base is None else self.base.base

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """By our names, a tensor or a matrix of codes at a time. HubError, CheckpointError where they are damaged."""
        if self.base is not None:
            yield from self.base.weights()
            return
        run, found = locate(self.path)
        yield from final_weights(run.plan, found, dtype)

    def numbers(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """As weights, with numbers in `dtype` for codes."""
        for name, found in self.weights(dtype):
            yield name, found.restored(dtype) if isinstance(found, QuantizedMatrix) else found

    def fingerprint(self) -> str:
        """Of its weights: of a run those of its newest checkpoint that is whole, which all ranks look for."""
        if self.hub is not None:
            return self.hub.fingerprint()
        _, found = locate(self.path)
        return digest([(found / NAME).read_text(encoding="utf-8")])


def folder_of(path: Path) -> TeacherFolder:
    """PlanError where there is none; HubError, RunError where it cannot be read."""
    if not path.is_dir():
        raise PlanError(f"teacher.init={path} does not exist: give a folder with weights, or a run, {OTHERWISE}")
    if (path / "plan.yaml").is_file():
        run = RunFolder.open(path)
        tokenizer = run.tokenizer if run.tokenizer.is_file() else None
        return TeacherFolder(path=path, shape=run.plan.model.base, tokenizer=tokenizer, base=None)
    base = open_weights(path)
    return TeacherFolder(path=path, shape=base.hub.shape, tokenizer=base.hub.tokenizer, base=base)


def check_teacher(plan: Plan) -> None:
    """PlanError where the teacher of a distillation cannot teach this student: it has no weights, other ones than the
    plan says, or another tokenizer, so that its distributions are over other tokens."""
    if not plan.recipe.traits.teacher or plan.teacher is None:
        return
    if plan.teacher_init == RANDOM:
        raise PlanError(
            f"teacher={plan.teacher.name} has no weights to teach with: give teacher=DIR, a Hugging Face folder or a "
            f"run, {OTHERWISE}"
        )
    folder = folder_of(Path(plan.teacher_init))
    for theirs, ours in zip_longest(tensor_sizes(folder.shape).items(), tensor_sizes(plan.teacher.base).items()):
        if theirs != ours:
            there, here = (f"{one[0]} {list(one[1])}" if one else "nothing more" for one in (theirs, ours))
            raise PlanError(
                f"teacher.init={plan.teacher_init} has another shape: {there} there, {here} in the plan. Take "
                f"teacher={plan.teacher_init} without changed sizes"
            )
    asked = plan.teacher.lora.base if plan.teacher.lora else ""
    if asked and folder.codes not in ("", asked):
        raise PlanError(
            f"teacher.init={plan.teacher_init} is quantized to {folder.codes} already, and teacher.lora.base={asked} "
            f"would round it a second time: take teacher.lora.base={folder.codes}"
        )
    if folder.tokenizer is None and plan.data.tokenizer == "auto":
        raise PlanError(
            f"teacher.init={plan.teacher_init} has no tokenizer.json, and it knows no other tokens: give "
            "data.tokenizer=PATH of its tokenizer"
        )
    if folder.tokenizer is not None and not means_the_same(plan.data.tokenizer, folder.tokenizer):
        raise PlanError(
            f"data.tokenizer={plan.data.tokenizer} differs from the tokenizer of "
            f"teacher.init={plan.teacher_init}: take data.tokenizer={folder.tokenizer}. With another "
            "tokenizer, train on texts that the teacher writes (`meshwright distill --sequences`)"
        )


def shared_tokens(plan: Plan) -> int:
    """Tokens that student and teacher both have a row for; 0 = all of either. One tokenizer serves both, and what is
    beyond it fills a matrix up."""
    assert plan.teacher is not None, "a distillation has one"
    sizes = {plan.model.vocab, plan.teacher.vocab}
    return min(sizes) if len(sizes) > 1 else 0


def check_shared(plan: Plan, tokenizer: Tokenizer) -> None:
    """PlanError where the text has tokens that one of both knows nothing of."""
    if not plan.recipe.traits.teacher or plan.teacher is None or tokenizer.vocab <= plan.teacher.vocab:
        return
    raise PlanError(
        f"teacher.vocab={plan.teacher.vocab} is smaller than the tokenizer's {tokenizer.vocab} tokens: take the "
        "tokenizer of the teacher, as data.tokenizer=PATH"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnlineTeacher:
    """A teacher on the student's ranks; asked for a micro-batch when the student's loss is made."""

    engine: Engine
    shared: int = 0

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """As AsksTeacher: nothing, since each micro-batch is asked about when its loss is made."""

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """As AsksTeacher. All ranks of a layout ask together."""
        learns, found = torch.is_grad_enabled(), list[DistillationLoss]()

        def compare(theirs: Predictions, targets: Tensor, _: Tensor | None) -> Tensor:
            with torch.set_grad_enabled(learns):
                found.append(predictions.divergence(theirs, targets, scale, form, self.shared))
            return torch.zeros((), device=targets.device)

        with torch.no_grad():
            self.engine.model.stage(
                None, batch.tokens, batch.targets, positions=batch.positions, documents=batch.documents,
                spans=batch.spans, objective=compare,
            )  # fmt: skip
        self.engine.reshard()  # no backward pass comes, which would
        return found[0]


def lay_out(
    shape: ModelShape, layout: Layout, mesh: Mesh, device: torch.device, dtype: torch.dtype, *, seed: int | None = None
) -> Engine:  # fmt: skip
    """A frozen model over the ranks of a mesh; without a seed its weights are left as memory is."""
    engine = build_engine(
        shape, layout, mesh=make_mesh(layout, rank=mesh.rank, made=mesh.made), device=device, dtype=dtype,
        seed=seed or 0, initialize=seed is not None, trains=False,
    )  # fmt: skip
    engine.eval()
    return engine


def build_teacher(plan: Plan, mesh: Mesh, device: torch.device) -> Engine:
    """The teacher of a plan, without weights yet."""
    assert plan.teacher is not None, "a distillation has one"
    layout = teacher_layout(plan.layout, plan.teacher)
    return lay_out(plan.teacher, layout, mesh, device, DTYPES[plan.recipe.precision])


@torch.no_grad()
def fill(engine: Engine, weights: Iterator[tuple[str, Tensor | QuantizedMatrix]]) -> None:
    """Put whole tensors, by name, into what this rank holds of them: numbers into codes where it holds codes, and codes
    that it has no room for as the numbers that they stand for."""
    boxes, buffers = engine.local_boxes(), engine.buffers
    coded = frozen_codes(engine.stages, engine.model.shape)
    places = {name: local(parameter.detach()) for name, parameter in engine.parameters.items()}
    for name, tensor in weights:
        if name in coded:
            if isinstance(tensor, Tensor):
                tensor = quantize_matrix(name, tensor.to(coded[name].device), coded[name].scheme)
            take_codes(coded[name], tensor)
        elif name in places:
            tensor = tensor if isinstance(tensor, Tensor) else tensor.restored(places[name].dtype)
            box = boxes[name]
            part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            places[name].copy_(tensor[part])
        elif name in buffers and isinstance(tensor, Tensor):
            buffers[name].copy_(tensor)


def distillation(plan: Plan, mesh: Mesh, device: torch.device, *, loads: bool = True) -> Distillation:
    """The objective of a plan; with the teacher that stands beside the student, if one does. Not `loads`: without its
    weights, for whoever wants only sizes."""
    form, shared = form_of(plan.recipe), shared_tokens(plan)
    if plan.recipe.distillation_top_k:
        return Distillation(form=form, shared=shared)
    engine = build_teacher(plan, mesh, device)
    if loads:
        fill(engine, folder_of(Path(plan.teacher_init)).weights(DTYPES[plan.recipe.precision]))
    return Distillation(form=form, teacher=beside(engine, shared), shared=shared)


def beside(engine: Engine, shared: int = 0) -> OnlineTeacher | StagedTeacher:
    """A teacher on the student's ranks, asked as its layout allows."""
    if engine.pipeline is None:
        return OnlineTeacher(engine=engine, shared=shared)
    return StagedTeacher(engine, shared)


def teacher_tensors(objective: Objective) -> list[Tensor]:
    """Parameters, codes and buffers of a teacher that stands beside the model; none where there is no such teacher."""
    if not isinstance(objective, Distillation) or objective.teacher is None:
        return []
    engine = objective.teacher.engine
    return [*engine.parameters.values(), *codes(engine), *engine.buffers.values()]
