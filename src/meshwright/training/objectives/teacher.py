"""The teacher of a distillation: a frozen model in addition to the student, laid out over the same ranks.

It runs where the student's loss is computed, without gradients. Hidden states of both models meet at their heads, so no
logits exist in full. Its traffic is counted separately, so a run's counts are those of its student.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.formats.hub import HubFolder
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.kernels.loss.linear_divergence import DistillationLoss, Divergence, TeacherHead
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import frozen_codes
from meshwright.model.transformer import Predictions
from meshwright.parallel import Engine, Mesh, build_engine, make_mesh
from meshwright.parallel.axes.data import local, take_codes
from meshwright.parallel.groups.group import digest
from meshwright.spec import Layout, ModelShape, Plan
from meshwright.spec.errors import PlanError, argument
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.rules.legal import teacher_layout
from meshwright.store.checkpoint_folder import COMMIT
from meshwright.store.model_weights import BaseFolder, final_weights, locate, open_weights
from meshwright.store.run_folder import RunFolder
from meshwright.training.objectives.objectives import Distillation, divergence_of
from meshwright.training.optimizer.optimizer import frozen_code_tensors
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Batch
from meshwright.training.step.state import is_same_tokenizer
from meshwright.training.step.step import EVALUATION, MicroPass, Objective

OTHERWISE = "or train without one, by recipe.objective=cross-entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFolder:
    """Source of a teacher's weights: a Hugging Face folder, or a run."""

    path: Path
    shape: ModelShape
    tokenizer: Path | None
    base: BaseFolder | None
    """None = the folder is a run."""

    @property
    def hub(self) -> HubFolder | None:
        """The Hugging Face folder. None = it is a run."""
        return None if self.base is None else self.base.hub

    @property
    def codes(self) -> str:
        """The `model.lora.base` of its codes. Empty = plain numbers, or codes of several kinds."""
        return "" if self.base is None else self.base.base

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """Yield weights under Meshwright's names, one tensor or matrix of codes at a time.

        Raises HubError or CheckpointError when they are damaged.
        """
        if self.base is not None:
            yield from self.base.weights()
            return
        run, checkpoint_path = locate(self.path)
        yield from final_weights(run.plan, checkpoint_path, dtype)

    def numbers(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with codes restored to `dtype`."""
        for name, weight in self.weights(dtype):
            yield name, weight.restored(dtype) if isinstance(weight, QuantizedMatrix) else weight

    def fingerprint(self) -> str:
        """Return a hash of the weights.

        For a run it is that of the newest intact checkpoint, which all ranks look for together.
        """
        if self.hub is not None:
            return self.hub.fingerprint()
        _, checkpoint_path = locate(self.path)
        return digest([(checkpoint_path / COMMIT).read_text(encoding="utf-8")])


def open_teacher(path: Path) -> TeacherFolder:
    """Open a teacher's folder.

    Raises PlanError when it does not exist, HubError or RunError when it cannot be read.
    """
    if not path.is_dir():
        raise PlanError(f"teacher.init={path} does not exist: give a folder with weights, or a run, {OTHERWISE}")
    if (path / "plan.yaml").is_file():
        run = RunFolder.open(path)
        tokenizer = run.tokenizer if run.tokenizer.is_file() else None
        return TeacherFolder(path=path, shape=run.plan.model.base, tokenizer=tokenizer, base=None)
    base = open_weights(path)
    return TeacherFolder(path=path, shape=base.hub.shape, tokenizer=base.hub.tokenizer, base=base)


def check_teacher(plan: Plan) -> None:
    """Raise PlanError when the teacher of a distillation cannot teach this student.

    It has no weights, other ones than the plan says, or another tokenizer, whose distributions are over other tokens.
    """
    if not plan.recipe.traits.teacher or plan.teacher is None:
        return
    if plan.teacher_init == RANDOM:
        raise PlanError(
            f"{argument('teacher', plan.teacher.name)} has no weights to teach with: give "
            f"{argument('teacher', 'DIR')}, a Hugging Face folder or a run, {OTHERWISE}"
        )
    folder = open_teacher(Path(plan.teacher_init))
    for stored_tensor, planned_tensor in zip_longest(
        tensor_sizes(folder.shape).items(), tensor_sizes(plan.teacher.base).items()
    ):
        if stored_tensor != planned_tensor:
            stored, planned = (
                f"{entry[0]} {list(entry[1])}" if entry else "nothing more" for entry in (stored_tensor, planned_tensor)
            )
            raise PlanError(
                f"teacher.init={plan.teacher_init} has another shape: {stored} there, {planned} in the plan. Take "
                f"{argument('teacher', plan.teacher_init)} without changed sizes"
            )
    planned_base = plan.teacher.lora.base if plan.teacher.lora else ""
    if planned_base and folder.codes not in ("", planned_base):
        raise PlanError(
            f"teacher.init={plan.teacher_init} is quantized to {folder.codes} already, and "
            f"teacher.lora.base={planned_base} would round it a second time: take teacher.lora.base={folder.codes}"
        )
    if folder.tokenizer is None and plan.data.tokenizer == "auto":
        raise PlanError(
            f"teacher.init={plan.teacher_init} has no tokenizer.json, and it knows no other tokens: give "
            "data.tokenizer=PATH of its tokenizer"
        )
    if folder.tokenizer is not None and not is_same_tokenizer(plan.data.tokenizer, folder.tokenizer):
        raise PlanError(
            f"data.tokenizer={plan.data.tokenizer} differs from the tokenizer of "
            f"teacher.init={plan.teacher_init}: take data.tokenizer={folder.tokenizer}. With another "
            "tokenizer, train on texts that the teacher writes (`meshwright distill --sequences`)"
        )


def shared_tokens(plan: Plan) -> int:
    """Return the number of tokens that student and teacher both have a row for. 0 = all of either.

    One tokenizer serves both; rows beyond it pad a matrix.
    """
    assert plan.teacher is not None, "a distillation has one"
    sizes = {plan.model.vocab, plan.teacher.vocab}
    return min(sizes) if len(sizes) > 1 else 0


def check_vocabulary(plan: Plan, tokenizer: Tokenizer) -> None:
    """Raise PlanError when the text has tokens that the teacher does not know."""
    if not plan.recipe.traits.teacher or plan.teacher is None or tokenizer.vocab <= plan.teacher.vocab:
        return
    raise PlanError(
        f"teacher.vocab={plan.teacher.vocab} is smaller than the tokenizer's {tokenizer.vocab} tokens: take the "
        "tokenizer of the teacher, as data.tokenizer=PATH"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnlineTeacher:
    """A teacher on the student's ranks, called for a micro-batch when the student's loss is computed."""

    engine: Engine
    shared: int = 0

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Do nothing: each micro-batch is run when its loss is computed."""

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """Run the teacher over a micro-batch and return the student's loss. All ranks call this together."""
        learns, losses = torch.is_grad_enabled(), list[DistillationLoss]()

        def compare(theirs: Predictions, targets: Tensor, _: Tensor | None) -> Tensor:
            with torch.set_grad_enabled(learns):
                losses.append(predictions.divergence(theirs, targets, scale, form, self.shared))
            return torch.zeros((), device=targets.device)

        with torch.no_grad():
            self.engine.model.stage(
                None, batch.tokens, batch.targets, positions=batch.positions, documents=batch.documents,
                spans=batch.spans, objective=compare,
            )  # fmt: skip
        self.engine.reshard()  # no backward pass follows that would
        return losses[0]


class HeadRecorder:
    """Stand-in for an objective that records the hidden states at the head on the last stage."""

    figures: tuple[str, ...] = ()

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies
        """True when the matrix is gathered, and soon freed."""
        self.weight: Tensor | None = None
        self.states: dict[int, Tensor] = {}
        """(N, D) by the identity of a batch."""

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Record the states and return zero."""
        head = predictions.head()
        if self.weight is None:
            self.weight = head.weight.clone() if self.copies else head.weight
        self.states[id(batch)] = head.x
        return torch.zeros((), device=batch.tokens.device)


class StagedTeacher:
    """Teacher of a student whose layers are a pipeline's stages. See AsksTeacher.

    Its own stages run the forward passes of all micro-batches of a step before the student's begin. Hidden states of
    every micro-batch wait with the teacher's head on the last rank, where the student's loss is computed. So neither
    model waits for the other's schedule, and memory grows by one row of hidden states per token.

    Letters: N tokens of a micro-batch, D width of the teacher.
    """

    def __init__(self, engine: Engine, shared: int = 0) -> None:
        self.engine, self.shared = engine, shared
        self._waiting: dict[int, Tensor] = {}
        self._weight: Tensor | None = None

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Run the forward passes of all micro-batches. All ranks call this together."""
        recorder = HeadRecorder(copies=self.engine.mesh.layout.zero == 3)
        self.engine.evaluate([MicroPass(batch, EVALUATION, recorder) for batch in batches])
        self.engine.reshard()  # no backward pass follows that would
        self._weight = recorder.weight
        self._waiting = {id(batch): recorder.states[id(batch)] for batch in batches} if recorder.states else {}

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """Return the student's loss on the last stage. Batches of a warm-up were never recorded: their states are 0."""
        assert self._weight is not None, "the last stage of both is on one rank"
        states = self._waiting.pop(id(batch), None)
        if states is None:
            states = self._weight.new_zeros(batch.targets.numel(), self._weight.shape[1])
        head = TeacherHead(states, self._weight)
        if not self._waiting:
            self._weight = None if self.engine.mesh.layout.zero == 3 else self._weight
        return predictions.divergence(head, batch.targets, scale, form, self.shared)


def lay_out(
    shape: ModelShape, layout: Layout, mesh: Mesh, device: torch.device, dtype: torch.dtype, *, seed: int | None = None
) -> Engine:  # fmt: skip
    """Build a frozen model over the ranks of a mesh. Without a seed its weights stay uninitialized."""
    engine = build_engine(
        shape, layout, mesh=make_mesh(layout, rank=mesh.rank, process_groups=mesh.process_groups),
        device=device, dtype=dtype, seed=seed or 0, initialize=seed is not None, trains=False,
    )  # fmt: skip
    engine.eval()
    return engine


def build_teacher(plan: Plan, mesh: Mesh, device: torch.device) -> Engine:
    """Build the teacher of a plan, without weights yet."""
    assert plan.teacher is not None, "a distillation has one"
    layout = teacher_layout(plan.layout, plan.teacher)
    return lay_out(plan.teacher, layout, mesh, device, DTYPES[plan.recipe.precision])


@torch.no_grad()
def load_weights(engine: Engine, weights: Iterator[tuple[str, Tensor | QuantizedMatrix]]) -> None:
    """Copy this rank's part of whole tensors, by name, into the engine.

    Numbers become codes where the engine holds codes. Codes become numbers where it does not.
    """
    boxes, buffers = engine.local_boxes(), engine.buffers
    coded = frozen_codes(engine.stages, engine.model.shape)
    shards = {name: local(parameter.detach()) for name, parameter in engine.parameters.items()}
    for name, tensor in weights:
        if name in coded:
            if isinstance(tensor, Tensor):
                tensor = quantize_matrix(name, tensor.to(coded[name].device), coded[name].scheme)
            take_codes(coded[name], tensor)
        elif name in shards:
            tensor = tensor if isinstance(tensor, Tensor) else tensor.restored(shards[name].dtype)
            box = boxes[name]
            part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            shards[name].copy_(tensor[part])
        elif name in buffers and isinstance(tensor, Tensor):
            buffers[name].copy_(tensor)


def build_distillation(plan: Plan, mesh: Mesh, device: torch.device, *, loads: bool = True) -> Distillation:
    """Return the objective of a plan, with the teacher that runs along with the student if it has one.

    `loads` False leaves out the weights, for callers that only need sizes.
    """
    form, shared = divergence_of(plan.recipe), shared_tokens(plan)
    if plan.recipe.distillation_top_k:
        return Distillation(form=form, shared=shared)
    engine = build_teacher(plan, mesh, device)
    if loads:
        load_weights(engine, open_teacher(Path(plan.teacher_init)).weights(DTYPES[plan.recipe.precision]))
    return Distillation(form=form, teacher=place_beside(engine, shared), shared=shared)


def place_beside(engine: Engine, shared: int = 0) -> OnlineTeacher | StagedTeacher:
    """Return a teacher on the student's ranks that fits its layout."""
    if engine.pipeline is None:
        return OnlineTeacher(engine=engine, shared=shared)
    return StagedTeacher(engine, shared)


def teacher_tensors(objective: Objective) -> list[Tensor]:
    """Return parameters, codes and buffers of a teacher that runs along with the model. Empty = there is none."""
    if not isinstance(objective, Distillation) or objective.teacher is None:
        return []
    engine = objective.teacher.engine
    return [*engine.parameters.values(), *frozen_code_tensors(engine), *engine.buffers.values()]
