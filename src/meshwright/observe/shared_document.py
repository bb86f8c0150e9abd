"""The JSON document that plan, dry run and profile share, validated once when it is read."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from meshwright.spec.errors import RunError, argument
from meshwright.store.run_folder import refuse_constant

NonNegativeInt = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]
NonNegative = Annotated[float, Field(allow_inf_nan=False, ge=0)]
LARGEST_BYTES = 2**30
"""Largest file that is read. A profile of 64 ranks has 20 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBytes:
    """Bytes of one kind of memory."""

    kind: str
    bytes: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEntry:
    """Traffic of one collective along one axis in a step."""

    axis: str
    collective: str
    bytes: NonNegativeInt
    calls: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """One part of a step's time."""

    what: str
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleActivations:
    """Bytes of activations of one module and operation."""

    where: str
    bytes: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTensor:
    """One of the largest tensors alive at the peak."""

    bytes: Annotated[int, Field(ge=0, validation_alias=AliasChoices("bytes", "size_bytes"))]
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: str = ""
    """Source line that made it: `meshwright/model/feed_forward.py:40 forward`."""
    operation: str = ""
    module: str = ""
    phase: str = ""
    """Part of the program in which it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A pass of a micro-batch, or a part of the step without one (stage and micro_batch are -1)."""

    name: str
    stage: int = -1
    micro_batch: int = -1
    start_s: Number
    end_s: Number

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPeak:
    """Peak memory of one part of the program."""

    name: str
    step: int = 0
    memory: tuple[KindBytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Memory, traffic and time of one rank. Empty fields were not measured."""

    rank: NonNegativeInt
    peak_bytes: NonNegativeInt | None = None
    reserved_bytes: NonNegativeInt | None = None
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
    """A prediction, a dry run or a measurement. None and empty fields are unknown."""

    source: Literal["predicted", "dryrun", "measured"]
    plan: dict[str, Any] = field(default_factory=dict)
    peak_bytes: NonNegativeInt | None = None
    peak_rank: NonNegativeInt | None = None
    memory: tuple[KindBytes, ...] = ()
    traffic: tuple[SentEntry, ...] | None = None
    time: tuple[TimePart, ...] = ()
    step_seconds: Positive | None = None
    tokens_per_second_per_device: NonNegative | None = None
    mfu_causal: NonNegative | None = None
    mfu_full: NonNegative | None = None
    hfu: NonNegative | None = None
    bubble_fraction: Number | None = None
    ranks: tuple[RankRecord, ...] = ()
    device: str = ""
    notes: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)


@cache
def _adapter() -> TypeAdapter[SharedDocument]:
    return TypeAdapter(SharedDocument)


def parse_document(document: object, name: str) -> SharedDocument:
    """Validate parsed JSON. Raises RunError naming `name` and the first invalid key."""
    try:
        return _adapter().validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise RunError(f"{name} is damaged or of another program: {key}: {first['msg'].lower()}; remove it") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None without a file. Raises RunError when it is damaged or no JSON object."""
    if not path.is_file():
        return None
    try:
        # A run folder may come from a stranger, and JSON takes many times its size in memory.
        if path.stat().st_size > LARGEST_BYTES:
            raise RunError(f"{path} is larger than any file of a run: remove it")
        content = json.loads(path.read_bytes(), parse_constant=refuse_constant)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged: it is no JSON; remove it") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object; remove it")
    return content


def read(path: Path, source: str) -> SharedDocument | None:
    """Return the document in a file, or None without a file. Raises RunError when it is damaged or not `source`."""
    content = read_json(path)
    if content is None:
        return None
    document = parse_document(content, str(path))
    if document.source != source:
        raise RunError(f"{path} says {argument('source', document.source)}, where {source!r} belongs: remove it")
    return document
