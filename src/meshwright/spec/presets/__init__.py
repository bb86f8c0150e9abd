"""Presets: published models and known devices, as data. Every number stands in a TOML file beside its source.

A model or device is added by adding a table to a file of `models/` or `devices/`; nothing else needs to change.
"""

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import ceil
from types import MappingProxyType
from typing import Any, TypeVar

from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.errors import PlanError
from meshwright.spec.linear_attention import LinearAttention
from meshwright.spec.lora import LoRAShape
from meshwright.spec.shape import MLAShape, ModelShape, MoEShape, RopeScaling
from meshwright.spec.unbuilt_parts import UnbuiltParts

T = TypeVar("T")
PARTS: dict[str, type] = {
    "moe": MoEShape, "mla": MLAShape, "rope_scaling": RopeScaling, "unbuilt": UnbuiltParts, "lora": LoRAShape,
}  # fmt: skip
"""Fields of a shape that are shapes themselves."""
CLOSE = 0.6
"""Likeness (difflib's ratio) from which on a name is taken for a slip of another."""
MOST_IN_NODE = 2**16
USUAL_NODE, LARGEST_NODE = 8, 16
"""Devices of a node as most are sold, and of the largest that is no rack (NVL72) or pod of TPUs."""
LISTED = 12
"""Names that are listed where none is like the one that was given."""
MAKERS = frozenset(
    ("nvidia", "tesla", "geforce", "quadro", "amd", "instinct", "intel", "google", "gpu",
     "hbm2", "hbm2e", "hbm3", "hbm3e")
)  # fmt: skip
"""Words that shops and drivers put beside a device's name."""
COUNT_FIRST = re.compile(r"\s*(\d+)\s*[x\u00d7*]\s*(.*\S)\s*")
COUNT_LAST = re.compile(r"\s*(.*\S)\s*(?:[x\u00d7*:]\s*|[\s_-]nvl)(\d+)\s*")
LONGEST = 80
"""Characters of an unknown name that are compared and repeated."""
UNITS = {"_gib": ("_bytes", 2**30), "_tflop_per_s": ("_flop_per_s", 1e12), "_gb_per_s": ("_bytes_per_s", 1e9)}
"""Endings of keys in the files: what they become, and times what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node that is sold under a name of its own."""

    names: tuple[str, ...]
    """As its seller writes it, in lower case, and what is in use beside that."""
    device: str
    """Preset of its devices."""
    devices: int
    """In one machine."""
    network_bytes_per_s: float
    """To other machines, per device, one direction; 0 = not known."""
    source: str
    """Where the numbers stand."""
    certainty: str = ""
    """Whether they were read there or recalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is known of a model: its fields, its parameter count as published, and where both stand."""

    name: str
    fields: Mapping[str, object]
    """Fields of ModelShape as its source gives them: what it leaves out (kv_heads, head_dim) is left out here too."""
    source: str
    parameters: int
    parameters_source: str
    active: str = ""
    """Parameters one token meets, as printed by the publisher; empty = not published."""
    active_without: str = ""
    """Parameter group the publisher leaves out of `active`."""
    active_source: str = ""


def model(name: str) -> ModelShape:
    """The shape called `name` (or an alias); PlanError with the nearest names where there is none."""
    return shape_of(published(name).fields)


def shape_of(fields: Mapping[str, Any]) -> ModelShape:
    """A shape from plain fields, its parts (moe, mla, rope_scaling) as mappings; PlanError with the nearest key for one
    that is not known, else errors as ModelShape."""
    given = {key: value for key, value in fields.items() if value is not None}
    if (linear := given.get("unbuilt", {}).get("linear")) is not None:
        given["unbuilt"] = {**given["unbuilt"], "linear": _made(LinearAttention, "unbuilt.linear", linear)}
    parts: dict[str, Any] = {key: _made(part, key, given[key]) for key, part in PARTS.items() if key in given}
    return _made(ModelShape, "model", {**fields, **parts})


def _made(kind: type[T], where: str, given: Mapping[str, Any]) -> T:
    """A dataclass of these fields."""
    known = inspect.signature(kind).parameters
    for key in given.keys() - known.keys():
        raise PlanError(f"{where}.{key} is not known; {suggested(key, known)}")
    for key, field in known.items():
        if field.default is field.empty and key not in given:
            raise PlanError(f"{where}.{key} is missing: give it")
    return kind(**given)


def model_names() -> tuple[str, ...]:
    """Every model, without aliases, family by family."""
    return tuple(dict.fromkeys(known.name for known in _models().values()))


def published(name: str, given: str = "") -> Published:
    """The model called `name` with its published count and sources; errors as `model`, about what was `given`:
    teacher='gpt2'."""
    return _models()[_find(name, _models(), "model", given)]


def device(name: str, given: str = "") -> Device:
    """The device called `name` (or an alias); `local` is a device nothing is known of. Errors as `model`, about what
    was `given`: devices='h100'."""
    given = given or f"cluster.device={name[:LONGEST]!r}"
    return _devices()[_find(_device_key(name), _devices(), "cluster.device", given)]


def device_names() -> tuple[str, ...]:
    """Every device by its shortest name, without aliases; `local` first."""
    seen: dict[int, str] = {}
    for name, known in _devices().items():
        seen.setdefault(id(known), name)
    return tuple(seen.values())


def cluster(name: str, nodes: int = 1) -> Cluster:
    """`DEVICE`, `DEVICExN` (N of them in a node, as h100x8) or a machine (p5.48xlarge), `nodes` of them; errors as
    `model`."""
    known, per_node = devices_in_node(name)
    return Cluster(device=known, devices_per_node=per_node, nodes=nodes)


def devices_in_node(name: str) -> tuple[Device, int]:
    """The device and how many of it a node has; errors as `model`."""
    known, per_node = split_cluster(name)
    if known not in _devices():
        near = suggested(known, (*_devices(), *_machines()))
        raise PlanError(f"cluster={name[:LONGEST]!r} is not known; {near}")
    found = _devices()[known]
    if (sold := machine(name)) is not None and sold.network_bytes_per_s:
        found = replace(found, network_bytes_per_s=sold.network_bytes_per_s)
    if not 1 <= per_node <= MOST_IN_NODE:
        raise PlanError(f"cluster={name[:LONGEST]!r}: a node has 1 to {MOST_IN_NODE:,} devices, as {known}x8")
    return found, per_node


def split_cluster(name: str) -> tuple[str, int]:
    """`h100x8`, `8xH100`, `4x RTX 4090`, `GB200 NVL72`, `p5.48xlarge` -> (device, its number in a node). Device names
    may hold an x themselves (mi300x, rtx4090): a known one wins."""
    if (sold := machine(name)) is not None:
        return sold.device, sold.devices
    name = name.lower()
    if len(name) <= LONGEST and _device_key(name) not in _devices():
        if (first := COUNT_FIRST.fullmatch(name)) and (first[2][0].isalpha() or _device_key(first[2]) in _devices()):
            return _device_key(first[2]), int(first[1])
        if last := COUNT_LAST.fullmatch(name):
            return _device_key(last[1]), int(last[2])
    return _device_key(name), 1


def machine(name: str) -> Machine | None:
    """The machine that is sold under this name: `p5.48xlarge`, `a3-highgpu-8g`, `DGX H100`; None where none is."""
    return _machines().get(re.sub(r"[\s_]+", "-", name.strip().lower()[:LONGEST]).removeprefix("standard-"))


def _device_key(name: str) -> str:
    """The preset that a device's name means, as shops and drivers spell it: `NVIDIA A100-SXM4-40GB`, `RTX 4090`,
    `h200-141gb`. The name itself, in lower case, where it means none."""
    words = _words_of(name)
    preset = _spellings().get("".join(sorted(words)))
    if preset is None and (sizes := [word for word in words if word.isdecimal()]):
        preset = _spellings().get("".join(sorted(word for word in words if word != sizes[-1])))
        gigabytes = _devices()[preset].memory_bytes / 1e9 if preset else 0.0
        if not gigabytes / 1.075 <= int(sizes[-1][:9]) <= 1.005 * gigabytes:  # a size in GiB or in GB
            preset = None
    return preset or _plain(name)


def _words_of(name: str) -> list[str]:
    """Of a device's name: makers left out, a socket without its generation, gigabytes as numbers."""
    words = re.split(r"[\s_-]+", name.strip().lower()[:LONGEST])
    words = [re.sub(r"^(\d+)(gb|gib)$", r"\1", re.sub(r"^sxm\d$", "sxm", word)) for word in words]
    return [word for word in words if word and word not in MAKERS and word not in ("gb", "gib")]


@cache
def _spellings() -> Mapping[str, str]:
    """The words of each device's names and aliases, in one -> its preset; rtx4090 and rtx-4090 alike."""
    presets: dict[str, str] = {}
    for key, known in reversed(list(_devices().items())):
        for spelled in (known.name, key):
            words = _words_of(spelled)
            presets.update(dict.fromkeys(("".join(sorted(words)), "".join(words)), key))
    return presets


def machines() -> tuple[Machine, ...]:
    """Every machine, seller by seller."""
    return tuple(dict.fromkeys(_machines().values()))


def device_note(name: str, nodes: int = 1) -> str:
    """Say what a cluster's name is taken for where that is not plain: a machine's, an alias of a GPU that is also sold
    with less memory, a count that looks like all GPUs of several nodes, and nodes of one device where none was asked
    for. Empty where the name is plain."""
    if (sold := machine(name)) is not None:
        network = f", with {sold.network_bytes_per_s / 1e9:g} GB/s of network each" if sold.network_bytes_per_s else ""
        return f"{name} is taken as {sold.devices} {device(sold.device).name}{network}."
    kind, per_node = split_cluster(name)
    known = _devices().get(kind)
    if known is None:
        return ""
    notes = []
    is_sized = f"{known.memory_bytes / 2**30:.0f}" in _words_of(name)
    sizes = (other for other in device_names() if re.fullmatch(rf"{re.escape(kind)}-\d+", other))
    others = [other for other in sizes if _devices()[other].memory_bytes < known.memory_bytes]
    if others and not is_sized:
        named = ", ".join(f"{other} ({_devices()[other].memory_bytes / 2**30:.0f} GiB)" for other in others)
        notes.append(f"{kind} is taken as {known.name} ({known.memory_bytes / 2**30:.0f} GiB); there are also {named}.")
    if nodes > 1 and per_node == 1 and _device_key(name) == kind:
        notes.append(
            f"{kind} --nodes {nodes} is {nodes} nodes of one device. One node of {nodes} is --cluster {kind}x{nodes}."
        )
    if per_node > LARGEST_NODE and not kind.startswith(("gb", "tpu")):
        nodes = ceil(per_node / USUAL_NODE)
        notes.append(
            f"{kind}x{per_node} is one node of {per_node} devices. "
            f"Nodes of {USUAL_NODE} are --cluster {kind}x{USUAL_NODE} --nodes {nodes}."
        )
    return " ".join(notes)


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The names that are as like as CLOSE, best first; none where no name is."""
    return get_close_matches(name[:LONGEST], list(known), most, CLOSE)


def suggested(name: str, known: Iterable[str], most: int = 3) -> str:
    """`nearest: a, b`; where no name is close, what there is: `known: a, b, c and 20 more`."""
    names = list(known)
    if close := nearest(name, names, most):
        return f"nearest: {', '.join(close)}"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED])}{more}"


def _find(name: str, known: Mapping[str, object], key: str, given: str = "") -> str:
    plain = _plain(name)
    if plain not in known:
        given = given or f"{key}={name[:LONGEST]!r}"
        raise PlanError(f"{given} is not known; {suggested(plain, known)}")
    return plain


def _plain(name: str) -> str:
    """`meta-llama/Llama-3.1-8B` and `llama_3.1_8b` are `llama-3.1-8b`."""
    return name.rpartition("/")[2].strip().lower().replace("_", "-")


def _tables(folder: str) -> list[dict[str, Any]]:
    """The TOML files of a folder of this package, by name."""
    found = [entry for entry in files(__name__).joinpath(folder).iterdir() if entry.name.endswith(".toml")]
    return [tomllib.loads(entry.read_text(encoding="utf-8")) for entry in sorted(found, key=lambda entry: entry.name)]


@cache
def _models() -> Mapping[str, Published]:
    """Name or alias -> model."""
    found: dict[str, Published] = {}
    for table in _tables("models"):
        for name, entry in table["models"].items():
            parts = {part: entry.pop(part) for part in PARTS if part in entry}
            fields = {"name": name, **table.get("shape", {}), **entry.pop("shape"), **parts}
            names = [name, *entry.pop("aliases", [])]
            _add(found, names, _made(Published, name, {"name": name, "fields": MappingProxyType(fields), **entry}))
    return MappingProxyType(found)


@cache
def _devices() -> Mapping[str, Device]:
    """Name or alias -> device; UNITS of the file become bytes, FLOP/s and bytes/s."""
    found = {"local": Device(name="local")}
    for table in _tables("devices"):
        for name, entry in table.items():
            names = [name, *entry.pop("aliases", [])]
            _add(found, names, Device(**dict(converted(key, value) for key, value in entry.items())))
    return MappingProxyType(found)


@cache
def _machines() -> Mapping[str, Machine]:
    """Name of a machine -> what it holds."""
    found: dict[str, Machine] = {}
    for table in _tables("machines"):
        for seller in table.values():
            source = {key: seller[key] for key in ("source", "certainty")}
            for names, kind, count, gigabits in seller["machines"]:
                sold = Machine(names=tuple(names.split()), device=kind, devices=count,
                               network_bytes_per_s=gigabits * 1e9 / 8 / count, **source)  # fmt: skip
                _add(found, list(sold.names), sold)
    return MappingProxyType(found)


def converted(key: str, value: Any) -> tuple[str, Any]:
    """A key of a device table and its number as the field of Device and its value."""
    for ending, (unit, factor) in UNITS.items():
        if key.endswith(ending):
            return key.removesuffix(ending) + unit, value * factor
    return key, value


def _add(found: dict[str, T], names: list[str], known: T) -> None:
    taken = found.keys() & names
    if taken:
        raise ValueError(f"presets: {sorted(taken)} are defined twice")
    found.update(dict.fromkeys(names, known))
