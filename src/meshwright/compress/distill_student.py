"""A student made of its teacher: some of its layers, and all else as it is.

Layers are taken at equal distances, the first and the last among them (Shleifer and Rush 2020, arXiv:2010.13002). The
student is written as a Hugging Face folder into the user's cache, by content, and a run begins with its weights.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.model.hub import export_folder
from meshwright.spec import ModelShape
from meshwright.spec.errors import PlanError
from meshwright.spec.user_cache import default_root
from meshwright.store.durable import one_line
from meshwright.store.model_weights import locate
from meshwright.training.precision import DTYPES
from meshwright.training.teacher import TeacherFolder, folder_of

_FORMAT = 1
"""Raised whenever the same teacher would give other files."""


def spread(layers: int, wanted: int) -> list[int]:
    """So many of a teacher's layers, at equal distances, both ends among them: 4 of 12 are 0, 4, 7, 11. PlanError."""
    if not 1 <= wanted < layers:
        raise PlanError(
            f"layers={wanted} of a teacher of {layers} must be at least 1 and below {layers}: take layers={layers // 2}"
        )
    return [round(index * (layers - 1) / max(1, wanted - 1)) for index in range(wanted)]


def shape_of_layers(teacher: ModelShape, kept: Sequence[int]) -> ModelShape:
    """The teacher's shape with some of its layers; PlanError where these are of other kinds than it has there."""
    found = replace(teacher, layers=len(kept), name=f"{teacher.name.removesuffix(' (changed)')}-{len(kept)}-layers")
    for own, layer in enumerate(kept):
        same = found.is_moe_layer(own) == teacher.is_moe_layer(layer)
        if not same or found.window_of(own) != teacher.window_of(layer):
            raise PlanError(
                f"layers={len(kept)}: layer {layer} of the teacher is of another kind (experts, or a window) than "
                f"layer {own} of a student of {len(kept)} layers: give the student as a folder, or as sizes"
            )
    return found


def student_of_layers(teacher: Path, wanted: int) -> Path:
    """The folder of a student with `wanted` layers of a teacher, a Hugging Face folder or a run; made where it is not
    there yet. PlanError, HubError, RunError, CheckpointError."""
    source = folder_of(teacher)
    kept = spread(source.shape.layers, wanted)
    shape = shape_of_layers(source.shape, kept)
    digest = hashlib.blake2b(repr((_FORMAT, source.fingerprint(), kept)).encode(), digest_size=8).hexdigest()
    out = default_root() / "students" / digest / shape.name
    if out.is_dir():
        return out
    dtype, chat = _dtype(source), source.hub.chat_template if source.hub else None
    with one_line(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        export_folder(
            out,
            model_tensors=_chosen(source.numbers(dtype), kept),
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


def _chosen(weights: Iterator[tuple[str, Tensor]], kept: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """The layers that are kept, by their new numbers, and what is in no layer."""
    numbers = {layer: own for own, layer in enumerate(kept)}
    for name, tensor in weights:
        first, _, rest = name.partition(".")
        if first != "layers":
            yield name, tensor
            continue
        layer, _, inside = rest.partition(".")
        if int(layer) in numbers:
            yield f"layers.{numbers[int(layer)]}.{inside}", tensor
