"""Presets: published models and known devices, as data. Every number is in a TOML file, next to its source.

To add a model or a device, add a table to a file of `models/` or `devices/`. Nothing else changes.
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

from meshwright.spec.errors import PlanError, argument
from meshwright.spec.layout.cluster import Cluster, Device
from meshwright.spec.model.shape import LoRAShape, MLAShape, ModelShape, MoEShape, RopeScaling
from meshwright.spec.model.unbuilt_parts import LinearAttention, UnbuiltParts

T = TypeVar("T")
PARTS: dict[str, type] = {
    "moe": MoEShape, "mla": MLAShape, "rope_scaling": RopeScaling, "unbuilt": UnbuiltParts, "lora": LoRAShape,
}  # fmt: skip
"""Fields of a shape that are shapes themselves."""
CLOSE = 0.6
"""Similarity (difflib's ratio) from which a name counts as a misspelling of another."""
MOST_IN_NODE = 2**16
USUAL_NODE, LARGEST_NODE = 8, 16
"""Devices of a usual node, and of the largest that is not a rack (NVL72) or a pod of TPUs."""
LISTED = 12
"""Names that are listed if none is similar."""
MAKERS = frozenset(
    ("nvidia", "tesla", "geforce", "quadro", "amd", "instinct", "intel", "google", "gpu",
     "hbm2", "hbm2e", "hbm3", "hbm3e")
)  # fmt: skip
"""Words that shops and drivers add to a device's name."""
COUNT_FIRST = re.compile(r"\s*(\d+)\s*[x\u00d7*]\s*(.*\S)\s*")
COUNT_LAST = re.compile(r"\s*(.*\S)\s*(?:[x\u00d7*:]\s*|[\s_-]nvl)(\d+)\s*")
LONGEST = 80
"""Characters of an unknown name that are compared and repeated."""
UNITS = {"_gib": ("_bytes", 2**30), "_tflop_per_s": ("_flop_per_s", 1e12), "_gb_per_s": ("_bytes_per_s", 1e9)}
"""Suffix of a key in the files -> (suffix of the field, factor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node that is sold under a name of its own."""

    names: tuple[str, ...]
    """Names by its seller, in lower case, and other common ones."""
    device: str
    """Preset of its devices."""
    devices: int
    """Devices in one machine."""
    network_bytes_per_s: float
    """Bandwidth to other machines, per device, one direction. 0 = unknown."""
    source: str
    """Source of the numbers."""
    certainty: str = ""
    """Origin of the numbers: read from the source or recalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published facts about a model: its fields, its parameter count, and the sources of both."""

    name: str
    fields: Mapping[str, object]
    """Fields of ModelShape as in the source: omitted ones (kv_heads, head_dim) are omitted here too."""
    source: str
    parameters: int
    parameters_source: str
    active: str = ""
    """Parameters that one token meets, as printed by the publisher. Empty = not published."""
    active_without: str = ""
    """Parameter group that the publisher leaves out of `active`."""
    active_source: str = ""


def model(name: str) -> ModelShape:
    """Return the shape called `name` (or an alias). Raises PlanError with the nearest names if it is unknown."""
    return shape_of(published(name).fields)


def shape_of(fields: Mapping[str, Any]) -> ModelShape:
    """Return a shape from plain fields. Raises PlanError with the nearest key, and the errors of ModelShape."""
    present = {key: value for key, value in fields.items() if value is not None}
    if (linear := present.get("unbuilt", {}).get("linear")) is not None:
        present["unbuilt"] = {**present["unbuilt"], "linear": _build(LinearAttention, "unbuilt.linear", linear)}
    parts: dict[str, Any] = {key: _build(part, key, present[key]) for key, part in PARTS.items() if key in present}
    return _build(ModelShape, "model", {**fields, **parts})


def _build(kind: type[T], where: str, present: Mapping[str, Any]) -> T:
    fields = inspect.signature(kind).parameters
    for key in present.keys() - fields.keys():
        raise PlanError(f"{where}.{key} is not known; {suggest(key, fields)}")
    for key, field in fields.items():
        if field.default is field.empty and key not in present:
            raise PlanError(f"{where}.{key} is missing: give it")
    return kind(**present)


def model_names() -> tuple[str, ...]:
    """Return every model without aliases, family by family."""
    return tuple(dict.fromkeys(entry.name for entry in _models().values()))


def published(name: str, key: str = "model") -> Published:
    """Return the model called `name` with its published count and sources. Errors name `key`."""
    return _models()[_find(name, _models(), key)]


def device(name: str, key: str = "cluster.device") -> Device:
    """Return the device called `name` (or an alias). `local` has no figures. Errors name `key`."""
    return _devices()[_find(_device_key(name), _devices(), key)]


def device_names() -> tuple[str, ...]:
    """Return every device by its shortest name, without aliases, `local` first."""
    seen: dict[int, str] = {}
    # Aliases come after the name and share its object.
    for name, preset in _devices().items():
        seen.setdefault(id(preset), name)
    return tuple(seen.values())


def cluster(name: str, nodes: int = 1) -> Cluster:
    """Return `nodes` of DEVICE, DEVICExN (N in a node, such as h100x8) or a machine (p5.48xlarge).

    Errors as `model`.
    """
    kind, per_node = devices_in_node(name)
    return Cluster(device=kind, devices_per_node=per_node, nodes=nodes)


def devices_in_node(name: str) -> tuple[Device, int]:
    """Return the device and how many of it a node has. Errors as `model`."""
    kind, per_node = split_cluster(name)
    if kind not in _devices():
        near = suggest(kind, (*_devices(), *_machines()))
        raise PlanError(f"{argument('cluster', name[:LONGEST])} is not known; {near}")
    device = _devices()[kind]
    if (sold := machine(name)) is not None and sold.network_bytes_per_s:
        device = replace(device, network_bytes_per_s=sold.network_bytes_per_s)
    if not 1 <= per_node <= MOST_IN_NODE:
        raise PlanError(f"{argument('cluster', name[:LONGEST])}: a node has 1 to {MOST_IN_NODE:,} devices, as {kind}x8")
    return device, per_node


def split_cluster(name: str) -> tuple[str, int]:
    """Split `h100x8`, `8xH100`, `GB200 NVL72` or `p5.48xlarge` into (device, number per node). Known names win."""
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
    """Return the machine sold as `p5.48xlarge`, `a3-highgpu-8g`, `DGX H100` ... None = there is none."""
    return _machines().get(re.sub(r"[\s_]+", "-", name.strip().lower()[:LONGEST]).removeprefix("standard-"))


def _device_key(name: str) -> str:
    """Return the preset of a device name as shops and drivers spell it, or the name in lower case."""
    words = _words_of(name)
    preset = _spellings().get("".join(sorted(words)))
    if preset is None and (sizes := [word for word in words if word.isdecimal()]):
        preset = _spellings().get("".join(sorted(word for word in words if word != sizes[-1])))
        gigabytes = _devices()[preset].memory_bytes / 1e9 if preset else 0.0
        # The size may be in GB, or in GiB, which is 7 % less. Any other means another device.
        if not gigabytes / 1.075 <= int(sizes[-1][:9]) <= 1.005 * gigabytes:
            preset = None
    return preset or _normalize(name)


def _words_of(name: str) -> list[str]:
    """Split a device's name into words, without makers, with sockets and gigabytes normalized."""
    words = re.split(r"[\s_-]+", name.strip().lower()[:LONGEST])
    words = [re.sub(r"^(\d+)(gb|gib)$", r"\1", re.sub(r"^sxm\d$", "sxm", word)) for word in words]
    return [word for word in words if word and word not in MAKERS and word not in ("gb", "gib")]


@cache
def _spellings() -> Mapping[str, str]:
    """Map the joined words of each device's names and aliases to its preset. rtx4090 and rtx-4090 are equal."""
    presets: dict[str, str] = {}
    # In reverse, so that of two devices with one spelling the first listed remains.
    for key, preset in reversed(list(_devices().items())):
        for spelled in (preset.name, key):
            words = _words_of(spelled)
            presets.update(dict.fromkeys(("".join(sorted(words)), "".join(words)), key))
    return presets


def machines() -> tuple[Machine, ...]:
    """Return every machine, seller by seller."""
    return tuple(dict.fromkeys(_machines().values()))


def device_note(name: str, nodes: int = 1) -> str:
    """Return how a cluster's name is interpreted if that is not obvious. Empty = it is.

    Notes are for machines, aliases of GPUs that are also sold with less memory, counts that look like all GPUs of
    several nodes, and several nodes of one device.
    """
    if (sold := machine(name)) is not None:
        network = f", with {sold.network_bytes_per_s / 1e9:g} GB/s of network each" if sold.network_bytes_per_s else ""
        return f"{name} is taken as {sold.devices} {device(sold.device).name}{network}."
    kind, per_node = split_cluster(name)
    preset = _devices().get(kind)
    if preset is None:
        return ""
    notes = []
    is_sized = f"{preset.memory_bytes / 2**30:.0f}" in _words_of(name)
    sizes = (other for other in device_names() if re.fullmatch(rf"{re.escape(kind)}-\d+", other))
    others = [other for other in sizes if _devices()[other].memory_bytes < preset.memory_bytes]
    # A bare name means the larger GPU, which matters to whoever rents the smaller one.
    if others and not is_sized:
        named = ", ".join(f"{other} ({_devices()[other].memory_bytes / 2**30:.0f} GiB)" for other in others)
        notes.append(
            f"{kind} is taken as {preset.name} ({preset.memory_bytes / 2**30:.0f} GiB); there are also {named}."
        )
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


def find_nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names that are at least as similar as CLOSE, best first."""
    return get_close_matches(name[:LONGEST], list(known), most, CLOSE)


def suggest(name: str, known: Iterable[str], most: int = 3) -> str:
    """Return `nearest: a, b`, or `known: a, b, c and 20 more` if no name is similar."""
    names = list(known)
    if close := find_nearest(name, names, most):
        return f"nearest: {', '.join(close)}"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED])}{more}"


def _find(name: str, known: Mapping[str, object], key: str) -> str:
    plain = _normalize(name)
    if plain not in known:
        raise PlanError(f"{argument(key, name[:LONGEST])} is not known; {suggest(plain, known)}")
    return plain


def _normalize(name: str) -> str:
    """Normalize a name: `meta-llama/Llama-3.1-8B` and `llama_3.1_8b` are `llama-3.1-8b`."""
    return name.rpartition("/")[2].strip().lower().replace("_", "-")


def _tables(folder: str) -> list[dict[str, Any]]:
    """Read the TOML files of a folder of this package, by name."""
    paths = [path for path in files(__name__).joinpath(folder).iterdir() if path.name.endswith(".toml")]
    return [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(paths, key=lambda path: path.name)]


@cache
def _models() -> Mapping[str, Published]:
    """Map names and aliases to models."""
    models: dict[str, Published] = {}
    for table in _tables("models"):
        for name, entry in table["models"].items():
            parts = {part: entry.pop(part) for part in PARTS if part in entry}
            fields = {"name": name, **table.get("shape", {}), **entry.pop("shape"), **parts}
            names = [name, *entry.pop("aliases", [])]
            _add(models, names, _build(Published, name, {"name": name, "fields": MappingProxyType(fields), **entry}))
    return MappingProxyType(models)


@cache
def _devices() -> Mapping[str, Device]:
    """Map names and aliases to devices. UNITS of the file become bytes, FLOP/s and bytes/s."""
    devices = {"local": Device(name="local")}
    for table in _tables("devices"):
        for name, entry in table.items():
            names = [name, *entry.pop("aliases", [])]
            _add(devices, names, Device(**dict(convert_units(key, value) for key, value in entry.items())))
    return MappingProxyType(devices)


@cache
def _machines() -> Mapping[str, Machine]:
    """Map names to machines."""
    machines_by_name: dict[str, Machine] = {}
    for table in _tables("machines"):
        for seller in table.values():
            source = {key: seller[key] for key in ("source", "certainty")}
            for names, kind, count, gigabits in seller["machines"]:
                sold = Machine(names=tuple(names.split()), device=kind, devices=count,
                               network_bytes_per_s=gigabits * 1e9 / 8 / count, **source)  # fmt: skip
                _add(machines_by_name, list(sold.names), sold)
    return MappingProxyType(machines_by_name)


def convert_units(key: str, value: Any) -> tuple[str, Any]:
    """Convert a key of a device table and its number to the field of Device and its value."""
    for ending, (unit, factor) in UNITS.items():
        if key.endswith(ending):
            return key.removesuffix(ending) + unit, value * factor
    return key, value


def _add(table: dict[str, T], names: list[str], entry: T) -> None:
    taken = table.keys() & names
    if taken:
        raise ValueError(f"presets: {sorted(taken)} are defined twice")
    table.update(dict.fromkeys(names, entry))
