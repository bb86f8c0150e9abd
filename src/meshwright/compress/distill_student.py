"""Students built from a subset of their teacher's layers; everything else is copied.

Layers are taken at equal distances, including the first and the last (Shleifer and Rush 2020, arXiv:2010.13002). The
student is written as a Hugging Face folder into the user's cache, addressed by content. A run starts from it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.formats.hub import export_folder
from meshwright.spec import ModelShape
from meshwright.spec.errors import PlanError
from meshwright.spec.user_cache import default_root
from meshwright.store.durable import report_in_one_line
from meshwright.store.model_weights import locate
from meshwright.training.objectives.teacher import TeacherFolder, open_teacher
from meshwright.training.optimizer.precision import DTYPES

_FORMAT = 1
"""Increased whenever the same teacher would produce different files."""


def spread_layers(layers: int, wanted: int) -> list[int]:
    """Return the indices of `wanted` layers at equal distances, with both ends: 4 of 12 are 0, 4, 7, 11.

    Raises PlanError unless 1 <= wanted < layers.
    """
    if not 1 <= wanted < layers:
        raise PlanError(
            f"layers={wanted} of a teacher of {layers} must be at least 1 and below {layers}: take layers={layers // 2}"
        )
    return [round(index * (layers - 1) / max(1, wanted - 1)) for index in range(wanted)]


def shape_of_layers(teacher: ModelShape, layers: Sequence[int]) -> ModelShape:
    """Return the teacher's shape with only these layers. Raises PlanError when their kinds do not fit its pattern."""
    student = replace(
        teacher, layers=len(layers), name=f"{teacher.name.removesuffix(' (changed)')}-{len(layers)}-layers"
    )
    for index, layer in enumerate(layers):
        same = student.is_moe_layer(index) == teacher.is_moe_layer(layer)
        if not same or student.window_of(index) != teacher.window_of(layer):
            raise PlanError(
                f"layers={len(layers)}: teacher layer {layer} differs in kind (experts or window) from student "
                f"layer {index} of {len(layers)}: give the student as a folder, or as sizes"
            )
    return student


def student_of_layers(teacher: Path, wanted: int) -> Path:
    """Return the folder of a student with `wanted` layers of a teacher, created unless it is cached.

    The teacher is a Hugging Face folder or a run. Raises PlanError, HubError, RunError, CheckpointError.
    """
    source = open_teacher(teacher)
    layers = spread_layers(source.shape.layers, wanted)
    shape = shape_of_layers(source.shape, layers)
    # The name says teacher, layers and format: another of any is another student.
    digest = hashlib.blake2b(repr((_FORMAT, source.fingerprint(), layers)).encode(), digest_size=8).hexdigest()
    out = default_root() / "students" / digest / shape.name
    if out.is_dir():
        return out
    # Written once into the cache. A later run starts at once.
    dtype, chat = _dtype(source), source.hub.chat_template if source.hub else None
    with report_in_one_line(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        export_folder(
            out,
            model_tensors=_choose_layers(source.numbers(dtype), layers),
            shape=shape,
            tokenizer=None if source.tokenizer is None else Tokenizer.load(source.tokenizer),
            dtype=dtype,
            chat_template=chat,
            generation=source.hub.generation if source.hub else None,
        )
    return out


def _dtype(source: TeacherFolder) -> torch.dtype:
    if source.hub is not None:
        return source.hub.dtype
    run, _ = locate(source.path)
    return DTYPES[run.plan.recipe.precision]


def _choose_layers(weights: Iterator[tuple[str, Tensor]], layers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters outside of layers and those of the chosen layers, renumbered."""
    numbers = {layer: index for index, layer in enumerate(layers)}
    for name, tensor in weights:
        first, _, rest = name.partition(".")
        if first != "layers":
            yield name, tensor
            continue
        layer, _, inside = rest.partition(".")
        if int(layer) in numbers:
            yield f"layers.{numbers[int(layer)]}.{inside}", tensor
