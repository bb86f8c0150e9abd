"""Cluster files: a machine as `meshwright calibrate` measured it, in TOML.

    devices_per_node = 2
    [device]            as spec/presets/devices/*.toml
    [provenance]        machine, date, versions, command: for people
    [stack]             costs of Meshwright's own software there: fields of planner.cost.stack.Stack
    [speeds.2]          for 2 ranks at once: scalars of planner.cost.speeds.Speeds, and grids of measured rates
    [speeds.2.host]     seconds of a layer on top of its kernels, if the host is the device: planner.cost.speeds.Host
    [serving]           rates of the serving engine: planner.serving.engine_rates.EngineRates
    [links.2.ranks_2]   seconds of an exchange between 2 of them

A grid is a table of increasing axes and, last, the values at all their combinations, the last axis running fastest.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, log
from pathlib import Path
from typing import Any

from meshwright.planner.cost.exchanges import Links, links_of
from meshwright.planner.cost.speeds import KINDS, DeviceCurves, Host, LinkCurves, Speeds, speeds_of
from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.kernels.fitted_kernel import RateGrid
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.spec import presets
from meshwright.spec.errors import PlanError, argument
from meshwright.spec.layout.cluster import Cluster, Device, split_file
from meshwright.spec.plan.plan import Plan

MENDING = "`meshwright calibrate --out FILE.toml` writes a whole one"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
WORDS = ("name", "source", "certainty", "watts_source", "plan_only")
"""Keys of a device that are text."""
WIDTHS = {"products_fp32": 4.0, "products_bf16": 2.0}
"""Grid of products -> bytes of an operand."""
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WIDTHS, ("m", "k", "n", "flop_per_s")),
    "engine_products": ("weights_bytes", "m", "k", "n", "flop_per_s"),
    "passes": ("bytes", "bytes_per_s"),
    "update": ("bytes", "bytes_per_s"),
    "attention_forward_curve": ("sequence", "dim", "flop_per_s"),
    "attention_backward_curve": ("sequence", "dim", "flop_per_s"),
    **dict.fromkeys(COLLECTIVES, ("bytes", "seconds")),
}
"""Grid -> its axes, and its values."""
SPEED_SCALARS = (
    "ranks_per_core", "launch_s", "product_share", "memory_share", "attention_forward", "attention_backward",
    "host_share",
)  # fmt: skip
SERVING_SCALARS = tuple(rate.name for rate in fields(EngineRates) if rate.name != "products")
LINK_SCALARS = ("curve_share", "base_s")
SHARES = ("hides_gradients", "hides_weights", "hides_tensor", "hides_beside", "hides_sends", "stalls")
"""Fields of a stack that are parts of a whole."""
STACK_SCALARS = (
    *(cost.name for cost in fields(Stack) if cost.name.endswith(("_s", "passes"))), *SHARES, "contention", "skew",
    "head_chunk_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Rates of a machine while a number of ranks work at once."""

    speeds: Speeds
    links: Links


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A measured machine."""

    device: Device
    devices_per_node: int = 1
    rates: Mapping[int, MeasuredRates]
    """Rates by the number of ranks that work at once."""
    stack: Stack = MESHWRIGHT
    provenance: Mapping[str, str] = field(default_factory=dict)
    serving: EngineRates | None = None
    """Rates of Meshwright's serving engine. None = not measured."""

    def cluster(self, devices_per_node: int = 0, nodes: int = 1) -> Cluster:
        """Return a cluster of such devices. 0 = as many in a node as the file says. Ranks of a core share it."""
        ranks = devices_per_node or self.devices_per_node
        memory = int(self.device.memory_bytes / self._near(ranks).speeds.ranks_per_core)
        return Cluster(device=replace(self.device, memory_bytes=memory), devices_per_node=ranks, nodes=nodes)

    def estimator(self, plan: Plan, document_tokens: float = 0.0) -> Estimator:
        """Return the estimator of a plan, by the rates of as many ranks in a node, or the nearest number."""
        ranks = plan.cluster.devices_per_node
        near = self._near(ranks)
        return build_estimator(plan, self.stack, near.speeds, replace(near.links, per_node=ranks), document_tokens)

    def _near(self, ranks: int) -> MeasuredRates:
        return self.rates[min(self.rates, key=lambda known: abs(log(known / ranks)))]


def load_named(name: str, nodes: int = 1) -> tuple[ClusterFile, Cluster]:
    """Return the file and the cluster that FILE.toml or FILE.tomlxN names. Raises PlanError, as `load` does."""
    path, per_node = split_file(name)
    machine = load(Path(path))
    return machine, machine.cluster(per_node, nodes)


def load(path: Path) -> ClusterFile:
    """Read a cluster file. Raises PlanError, with a message of one line, when it is none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{argument('cluster', path)} cannot be read, {str(error.strerror).lower()}: "
            "`meshwright calibrate -o FILE.toml` makes one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"cluster file {path} is no TOML ({' '.join(str(error).split())}): {MENDING}") from None
    try:
        return _read(document)
    except ValueError as error:
        raise PlanError(f"cluster file {path}: {error}") from None


def _read(document: dict[str, Any]) -> ClusterFile:
    _known("", document, ("devices_per_node", "device", "provenance", "stack", "speeds", "links", "serving"))
    device = _device(_table("device", document))
    per_node = document.get("devices_per_node", 1)
    if type(per_node) is not int or not 1 <= per_node < 10**6:
        raise ValueError(f"devices_per_node={per_node!r} must be a whole number of 1 or more")
    speeds = {_ranks("speeds", key): table for key, table in _table("speeds", document).items()}
    if not speeds:
        raise ValueError(f"[speeds] has no table [speeds.N] for N ranks: {MENDING}")
    links = {_ranks("links", key): table for key, table in _table("links", document, {}).items()}
    if unknown := links.keys() - speeds.keys():
        raise ValueError(f"[links.{min(unknown)}] has no [speeds.{min(unknown)}] to go with it: {MENDING}")
    rates = {
        ranks: MeasuredRates(
            speeds=_speeds(f"speeds.{ranks}", device, table), links=_links(device, ranks, links.get(ranks))
        )
        for ranks, table in speeds.items()
    }
    provenance = {str(key): str(text) for key, text in _table("provenance", document, {}).items()}
    return ClusterFile(
        device=device, devices_per_node=per_node, rates=rates, stack=_stack(_table("stack", document, {})),
        provenance=provenance, serving=_serving(document["serving"]) if "serving" in document else None,
    )  # fmt: skip


def _device(table: dict[str, Any]) -> Device:
    keys = [figure.name for figure in fields(Device)]
    endings = {unit: ending for ending, (unit, _) in presets.UNITS.items()}
    short = [next((key.removesuffix(u) + e for u, e in endings.items() if key.endswith(u)), key) for key in keys]
    _known("device", table, short)
    if not isinstance(table.get("name"), str) or not table["name"].strip():
        raise ValueError("device.name is missing: what reports call it")
    words = {key: value for key, value in table.items() if key in WORDS}
    for key, word in words.items():
        if not isinstance(word, str):
            raise ValueError(f"device.{key}={word!r} must be text")
    numbers = {key: _number(f"device.{key}", number, zero=True) for key, number in table.items() if key not in words}
    converted = dict(presets.convert_units(key, number) for key, number in numbers.items())
    if "memory_bytes" in converted:
        converted["memory_bytes"] = int(converted["memory_bytes"])
    return Device(**words, **converted)


def _speeds(where: str, device: Device, table: Any) -> Speeds:
    needed = [name for name in AXES if name not in (*WIDTHS, *COLLECTIVES, "engine_products")]
    _known(where, table, (*needed, *WIDTHS, *SPEED_SCALARS, "host"))
    grids = {name: _grid(f"{where}.{name}", name, table[name]) for name in table if name in AXES}
    for name in (*needed, *(["products_fp32"] if not grids.keys() & WIDTHS.keys() else [])):
        if name not in grids:
            raise ValueError(f"{where}.{name} is missing: {MENDING}")
    curves = DeviceCurves(
        products={width: grids[name] for name, width in WIDTHS.items() if name in grids},
        passes=grids["passes"],
        attention=(grids["attention_forward_curve"], grids["attention_backward_curve"]),
        update=grids["update"],
    )
    scalars = {
        name: _number(f"{where}.{name}", table[name], zero=name in ("launch_s", "host_share"))
        for name in SPEED_SCALARS
        if name in table
    }
    plain: dict[str, Any] = {
        "launch_s": 0.0,
        "product_share": 1.0,
        "memory_share": 1.0,
        "attention_forward": 1.0,
        "attention_backward": 1.0,
    }
    best = max(max(grid.values) for grid in curves.products.values())
    return replace(
        speeds_of(device), matmul_flop_per_s=best, peak_flop_per_s=device.half_flop_per_s or best,
        curves=curves, host=_host(f"{where}.host", table["host"]) if "host" in table else None,
        **(plain | scalars),
    )  # fmt: skip


def _host(where: str, table: Any) -> Host:
    _known(where, table, KINDS)
    host: dict[str, Any] = {}
    for name, values in table.items():
        if not isinstance(values, list) or len(values) != 3:
            raise ValueError(f"{where}.{name} must be three numbers, forward, backward, selective: {MENDING}")
        host[name] = tuple(_number(f"{where}.{name}", seconds, zero=True) for seconds in values)
    return Host(**host)


def _links(device: Device, ranks: int, table: Any) -> Links:
    base = links_of(Cluster(device=device, devices_per_node=ranks))
    if table is None:
        return base
    where = f"links.{ranks}"
    curves: dict[tuple[str, int], Any] = {}
    scalars: dict[str, Any] = {}
    if not isinstance(table, dict):
        raise ValueError(f"[{where}] must be a table")
    for key, entry in table.items():
        if key in LINK_SCALARS:
            scalars[key] = _number(f"{where}.{key}", entry)
            continue
        if not key.startswith("ranks_"):
            _known(where, {key: entry}, (*LINK_SCALARS, f"ranks_{ranks}"))
        size = _ranks(f"{where}.ranks", key.removeprefix("ranks_"))
        if not 2 <= size <= ranks:
            raise ValueError(f"[{where}.{key}]: a group has 2 to {ranks} ranks")
        _known(f"{where}.{key}", entry, COLLECTIVES)
        curves.update({(name, size): _grid(f"{where}.{key}.{name}", name, grid) for name, grid in entry.items()})
    return replace(base, curves=LinkCurves(seconds=curves), **scalars)


def _stack(table: dict[str, Any]) -> Stack:
    _known("stack", table, STACK_SCALARS)
    costs: dict[str, Any] = {name: _number(f"stack.{name}", cost, zero=True) for name, cost in table.items()}
    for name, cost in costs.items():
        if name in SHARES and cost > 1:
            raise ValueError(f"stack.{name}={cost:g} is a share: 0 to 1")
    return replace(MESHWRIGHT, **costs)


def _serving(table: Any) -> EngineRates:
    _known("serving", table, (*SERVING_SCALARS, "products"))
    if "products" not in table:
        raise ValueError(f"serving.products is missing: {MENDING}")
    with_default = {"prompt_layer_s": 0.0, **table}  # older files do not have it
    scalars = {name: _number(f"serving.{name}", with_default.get(name), zero=True) for name in SERVING_SCALARS}
    return EngineRates(products=_grid("serving.products", "engine_products", table["products"]), **scalars)


def _grid(where: str, name: str, table: Any) -> RateGrid:
    *names, values = AXES[name]
    _known(where, table, AXES[name])
    for key in AXES[name]:
        if not isinstance(table.get(key), list) or not table[key]:
            raise ValueError(f"{where}.{key} is missing or no list of numbers: {MENDING}")
    lists = {key: tuple(_number(f"{where}.{key}", number) for number in table[key]) for key in AXES[name]}
    count = 1
    for key in names:
        count *= len(lists[key])
        if any(b <= a for a, b in zip(lists[key], lists[key][1:], strict=False)):
            raise ValueError(f"{where}.{key} must increase from one to the next")
    if len(lists[values]) != count:
        raise ValueError(f"{where}.{values} has {len(lists[values])} numbers; its axes make {count}")
    return RateGrid(tuple(lists[key] for key in names), lists[values])


def _table(name: str, document: Mapping[str, Any], default: dict[str, Any] | None = None) -> dict[str, Any]:
    table = document.get(name, default)
    if table is None:
        raise ValueError(f"[{name}] is missing: {MENDING}")
    if not isinstance(table, dict):
        raise ValueError(f"{name}={table!r} must be a table")
    return table


def _known(where: str, table: Any, names: Iterable[str]) -> None:
    names = list(names)
    if not isinstance(table, dict):
        raise ValueError(f"{where}={table!r} must be a table")
    for key in table:
        if key not in names:
            path = f"{where}.{key}" if where else key
            raise ValueError(f"{path} is not known; {presets.suggest(key, names)}")


def _number(where: str, number: Any, *, zero: bool = False) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number) or number < 0:
        raise ValueError(f"{where}={number!r} must be a finite number {'of 0 or more' if zero else 'above 0'}")
    if number == 0 and not zero:
        raise ValueError(f"{where}=0 must be above 0")
    return float(number)


def _ranks(where: str, key: str) -> int:
    if not key.isdecimal() or not 1 <= int(key) < 10**6:
        raise ValueError(f"[{where}.{key}]: {key!r} is no number of ranks")
    return int(key)


def text(machine: ClusterFile) -> str:
    """Return the TOML text of a machine, which `load` reads back."""
    lines = [
        "# A machine as measured by `meshwright calibrate`; `meshwright plan MODEL --cluster FILE.toml` reads it.",
        "",
    ]
    lines += [f"devices_per_node = {machine.devices_per_node}", "", "[device]", *_device_lines(machine.device), ""]
    lines += ["[provenance]", *(f"{key} = {_word_text(word)}" for key, word in machine.provenance.items()), ""]
    stack = {name: getattr(machine.stack, name) for name in STACK_SCALARS}
    lines += ["[stack]"]
    lines += [f"{name} = {_figure_text(cost)}" for name, cost in stack.items() if cost != getattr(MESHWRIGHT, name)]
    for ranks, rates in sorted(machine.rates.items()):
        lines += ["", f"[speeds.{ranks}]", *_speed_lines(rates.speeds)]
        if rates.speeds.host:
            values = ((name, getattr(rates.speeds.host, name)) for name in KINDS)
            lines += ["", f"[speeds.{ranks}.host]", *(f"{name} = {_list_text(three)}" for name, three in values)]
        if rates.links.curves:
            lines += ["", f"[links.{ranks}]", *_link_lines(ranks, rates.links)]
    if machine.serving:
        lines += ["", "[serving]"]
        lines += [f"{name} = {_figure_text(getattr(machine.serving, name))}" for name in SERVING_SCALARS]
        lines += [f"products = {_grid_text('engine_products', machine.serving.products)}"]
    return "\n".join(lines) + "\n"


def _device_lines(device: Device) -> Iterator[str]:
    for key in fields(device):
        figure = getattr(device, key.name)
        if not figure:
            continue
        if isinstance(figure, str):
            yield f"{key.name} = {_word_text(figure)}"
            continue
        ending, (unit, factor) = next(entry for entry in presets.UNITS.items() if key.name.endswith(entry[1][0]))
        yield f"{key.name.removesuffix(unit)}{ending} = {_figure_text(figure / factor)}"


def _speed_lines(speeds: Speeds) -> Iterator[str]:
    curves = speeds.curves
    assert curves is not None
    yield from (f"{name} = {_figure_text(getattr(speeds, name))}" for name in SPEED_SCALARS)
    widths = {width: name for name, width in WIDTHS.items()}
    grids = {widths[width]: grid for width, grid in curves.products.items()}
    grids |= {"passes": curves.passes, "update": curves.update}
    grids |= {"attention_forward_curve": curves.attention[0], "attention_backward_curve": curves.attention[1]}
    for name, grid in grids.items():
        yield f"{name} = {_grid_text(name, grid)}"


def _link_lines(ranks: int, links: Links) -> Iterator[str]:
    assert links.curves is not None
    yield from (f"{name} = {_figure_text(getattr(links, name))}" for name in LINK_SCALARS)
    for size in sorted({size for _, size in links.curves.seconds}):
        yield f"[links.{ranks}.ranks_{size}]"
        for (name, ranks_of_curve), grid in links.curves.seconds.items():
            if ranks_of_curve == size:
                yield f"{name} = {_grid_text(name, grid)}"


def _grid_text(name: str, grid: RateGrid) -> str:
    *names, values = AXES[name]
    parts = [f"{key} = {_list_text(axis)}" for key, axis in zip(names, grid.axes, strict=True)]
    return "{ " + ", ".join([*parts, f"{values} = {_list_text(grid.values)}"]) + " }"


def _list_text(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(map(_figure_text, numbers)) + "]"


def _figure_text(value: float) -> str:
    return f"{value:.6g}" if "e" in f"{value:.6g}" or "." in f"{value:.6g}" else f"{value:.0f}"


def _word_text(value: str) -> str:
    return json.dumps(value, ensure_ascii=True)
