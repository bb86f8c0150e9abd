"""Model settings that a plan takes from a folder with weights."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import MeshwrightError, PlanError
from meshwright.spec.model.lora import NONE
from meshwright.spec.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """Shape and quantization of a Hugging Face folder or a run."""

    shape: ModelShape
    codes: str = ""
    """Quantization of the matrices as a value of `model.lora.base`. Empty = plain numbers."""
    refusal: MeshwrightError | None = None
    """Why no adapter can be trained beside codes that `model.lora.base` cannot name. None = one can."""


ReadFolder = Callable[[Path], FolderModel]


def fields_of(
    folder: FolderModel, fields: Mapping[str, Any], section: str, name: str, *, weights: bool
) -> dict[str, Any]:
    """Return the fields of a model from a folder.

    Codes are used as they are; those of a teacher without a name in `model.lora.base` are restored to numbers.

    Args:
        folder: The model in the folder.
        fields: Fields that the plan sets on top.
        section: `model` or `teacher`.
        name: The folder as the plan names it.
        weights: The weights are taken too, not only the shape.

    Raises:
        PlanError: Nothing can be trained beside the codes, or the plan asks for other ones.
    """
    known = asdict(folder.shape)
    if not weights:
        return known
    if section == "model" and folder.refusal is not None:
        raise folder.refusal
    if not folder.codes:
        return known
    # a teacher is never trained, so its codes are held as a frozen base without adapters
    if section != "model":
        return known | {"lora": {"rank": 1, "targets": NONE, "base": folder.codes}}
    # codes have no gradient: without adapters nothing would be trained
    lora = fields.get("lora")
    if not isinstance(lora, Mapping):
        raise PlanError(
            f"model={name} holds codes ({folder.codes}), which only adapters can train: give "
            "model.lora.rank=16, or the folder that it was quantized from"
        )
    if lora.get("base", folder.codes) != folder.codes:
        raise PlanError(
            f"model={name} is quantized to {folder.codes} already, and model.lora.base={lora['base']} would "
            "round it again: leave model.lora.base out, or give the folder that it was quantized from"
        )
    return known | {"lora": {"base": folder.codes}}
