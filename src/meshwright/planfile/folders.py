"""What a plan takes of a folder with weights."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import MeshwrightError, PlanError
from meshwright.spec.lora import NONE
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """Of a Hugging Face folder, or of a run."""

    shape: ModelShape
    codes: str = ""
    """As what its matrices are held there, a `model.lora.base`; empty = as numbers."""
    refusal: MeshwrightError | None = None
    """Why nothing can be trained beside its codes, which no word of `model.lora.base` names."""


ReadFolder = Callable[[Path], FolderModel]


def fields_of(
    found: FolderModel, fields: Mapping[str, Any], section: str, name: str, *, weights: bool
) -> dict[str, Any]:
    """Fields of a model whose shape, and with `weights` its numbers, are a folder's; `fields` are put on top of them.
    Codes are held as they are; a teacher's that have no name are restored to numbers. PlanError where nothing can be
    trained beside them, or others are asked for."""
    known = asdict(found.shape)
    if not weights:
        return known
    if section == "model" and found.refusal is not None:
        raise found.refusal
    if not found.codes:
        return known
    if section != "model":
        return known | {"lora": {"rank": 1, "targets": NONE, "base": found.codes}}
    lora = fields.get("lora")
    if not isinstance(lora, Mapping):
        raise PlanError(
            f"model={name} holds codes ({found.codes}), beside which adapters are trained: give model.lora.rank=16, or "
            "the folder that it was quantized from"
        )
    if lora.get("base", found.codes) != found.codes:
        raise PlanError(
            f"model={name} is quantized to {found.codes} already, and model.lora.base={lora['base']} would round it a "
            "second time: leave it out, or give the folder that it was quantized from"
        )
    return known | {"lora": {"base": found.codes}}
