"""The shared JSON of plan, dry run and profile as it is read again: checked once, at the door."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from meshwright.spec.errors import RunError
from meshwright.store.run_folder import refuse_constant

Whole = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]
NotNegative = Annotated[float, Field(allow_inf_nan=False, ge=0)]
LARGEST_BYTES = 2**30
"""A file beyond this is none of ours: a profile of 64 ranks has 20 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBytes:
    """Bytes of one kind of memory."""

    kind: str
    bytes: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEntry:
    """One collective along one axis, in a step."""

    axis: str
    collective: str
    bytes: Whole
    calls: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """A part of a step's time."""

    what: str
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleActivations:
    """Bytes of activations by module and operation."""

    where: str
    bytes: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTensor:
    """One of the largest tensors alive at the peak."""

    bytes: Annotated[int, Field(ge=0, validation_alias=AliasChoices("bytes", "size_bytes"))]
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: str = ""
    """What made it: `meshwright/model/mlp.py:40 forward`."""
    operation: str = ""
    module: str = ""
    phase: str = ""
    """When it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A pass of a micro-batch, or a part of the step without one (stage and micro_batch -1)."""

    name: str
    stage: int = -1
    micro_batch: int = -1
    start_s: Number
    end_s: Number

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPeak:
    """A part of the program when it held most."""

    name: str
    step: int = 0
    memory: tuple[KindBytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank held, sent and did; a field that is empty was not looked at."""

    rank: Whole
    peak_bytes: Whole | None = None
    reserved_bytes: Whole | None = None
    when: str = ""
    memory: tuple[KindBytes, ...] = ()
    traffic: tuple[SentEntry, ...] | None = None
    time: tuple[TimePart, ...] = ()
    spans: tuple[Ran, ...] = ()
    activations: tuple[ModuleActivations, ...] = ()
    largest: tuple[LargeTensor, ...] = ()
    passes: tuple[PartPeak, ...] = ()
    memory_timeline: tuple[PartPeak, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDocument:
    """A prediction, a dry run or a measurement. None and empty: not known."""

    source: Literal["predicted", "dryrun", "measured"]
    plan: dict[str, Any] = field(default_factory=dict)
    peak_bytes: Whole | None = None
    peak_rank: Whole | None = None
    memory: tuple[KindBytes, ...] = ()
    traffic: tuple[SentEntry, ...] | None = None
    time: tuple[TimePart, ...] = ()
    step_seconds: Positive | None = None
    tokens_per_second_per_device: NotNegative | None = None
    mfu_causal: NotNegative | None = None
    mfu_full: NotNegative | None = None
    hfu: NotNegative | None = None
    bubble_fraction: Number | None = None
    ranks: tuple[RankRecord, ...] = ()
    device: str = ""
    notes: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)


@cache
def _adapter() -> TypeAdapter[SharedDocument]:
    return TypeAdapter(SharedDocument)


def checked(found: object, name: str) -> SharedDocument:
    """A document from parsed JSON; RunError names `name` and the first key that is wrong."""
    try:
        return _adapter().validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise RunError(f"{name} is damaged or of another program: {key}: {first['msg'].lower()}; remove it") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no file. RunError: damaged, not JSON, no object."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise RunError(f"{path} is larger than any file of a run: remove it")
        found = json.loads(path.read_bytes(), parse_constant=refuse_constant)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged: it is no JSON; remove it") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object; remove it")
    return found


def read(path: Path, source: str) -> SharedDocument | None:
    """The document in a file, which must be one of `source`; None where there is no file. RunError."""
    found = read_json(path)
    if found is None:
        return None
    document = checked(found, str(path))
    if document.source != source:
        raise RunError(f"{path} says source={document.source!r}, where {source!r} belongs: remove it")
    return document
