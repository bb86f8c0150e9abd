"""Model that a configuration file names: a preset, a published model, a folder, a model of the Hub, or a guess."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec import ModelShape, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.hub_names import download_hint
from meshwright.spec.presets import suggest
from meshwright.stacks.declaration.hub_models import likely_preset, preset_of_hub
from meshwright.stacks.declaration.option import OUTSIDE, Facts
from meshwright.stacks.declaration.software import TrainingSoftware

CODED = re.compile(r"gptq|awq|aqlm|hqq|w4a16|w8a8|int[48]\b|[48]bit|\bfp8\b")
"""Words in names of folders with quantized matrices."""
ReadFolder = Callable[[Path], ModelShape]
ReadHub = Callable[[str], ModelShape | None]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Sources for the shape of the model that a file names."""

    folder: ReadFolder | None
    hub: ReadHub | None
    chosen: ModelShape | None

    def shape(self, software: TrainingSoftware, facts: Facts, path: Path, notes: list[str]) -> ModelShape | None:
        """Return the model that the file names, or None. A guess is added to the notes."""
        shape = software.shape(facts)
        if shape is not None:
            return shape
        name = facts.get("hub")
        if not isinstance(name, str) or not name:
            return None
        if coded := CODED.search(name.lower()):
            notes.append(f"{coded[0]} in {name}: frozen matrices are counted in 16 bits where no option says fewer.")
        known = preset_of_hub(name)
        if known is not None:
            return known
        folder = next(
            (candidate for candidate in (Path(name), path.parent / name) if (candidate / "config.json").is_file()), None
        )
        if folder is not None and self.folder is not None:
            return self.folder(folder)
        shape = self.hub(name) if self.hub is not None else None
        if shape is not None:
            return shape
        likely = likely_preset(name)
        if likely is not None:
            notes.append(f"The model {name} is taken as {likely.name}, by its name: give MODEL for another.")
            return likely
        if name.startswith(OUTSIDE):
            raise PlanError(
                f"{path}: model {name} is set outside the file: give MODEL, a preset or a folder, as `{example(path)}`"
            )
        near = suggest(name.rstrip("/").rpartition("/")[2].lower(), presets.model_names())
        raise PlanError(
            f"{path}: model {name!r} is not known here: give MODEL, a preset or a folder with its config.json, as "
            f"`{example(path)}`; {near}{download_hint(name)}"
        )


def example(path: Path) -> str:
    """Return a command that passes a known model beside the file."""
    return f"meshwright plan llama-3.1-8b --from {path.name}"
