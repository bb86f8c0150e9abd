"""ClusterFile -> TOML text that `clusterfile.load` reads back, and that people can."""

import json
from collections.abc import Iterator
from dataclasses import fields

from meshwright.planner.cost.host_time import KINDS
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.kernels.rate_grid import RateGrid
from meshwright.planner.machine.clusterfile import (
    AXES,
    LINK_SCALARS,
    SERVING_SCALARS,
    SPEED_SCALARS,
    STACK_SCALARS,
    WIDTHS,
    ClusterFile,
)
from meshwright.spec.cluster import Device
from meshwright.spec.presets import UNITS


def text(found: ClusterFile) -> str:
    """The file."""
    lines = [
        "# A machine as measured by `meshwright calibrate`; `meshwright plan MODEL --cluster FILE.toml` reads it.",
        "",
    ]
    lines += [f"devices_per_node = {found.devices_per_node}", "", "[device]", *_device(found.device), ""]
    lines += ["[provenance]", *(f"{key} = {_word(value)}" for key, value in found.provenance.items()), ""]
    stack = {name: getattr(found.stack, name) for name in STACK_SCALARS}
    lines += ["[stack]"]
    lines += [f"{name} = {_figure(value)}" for name, value in stack.items() if value != getattr(MESHWRIGHT, name)]
    for ranks, one in sorted(found.together.items()):
        lines += ["", f"[speeds.{ranks}]", *_speeds(one.speeds)]
        if one.speeds.host:
            values = ((name, getattr(one.speeds.host, name)) for name in KINDS)
            lines += ["", f"[speeds.{ranks}.host]", *(f"{name} = {_list(three)}" for name, three in values)]
        if one.links.curves:
            lines += ["", f"[links.{ranks}]", *_links(ranks, one.links)]
    if found.serving:
        lines += ["", "[serving]"]
        lines += [f"{name} = {_figure(getattr(found.serving, name))}" for name in SERVING_SCALARS]
        lines += [f"products = {_grid('engine_products', found.serving.products)}"]
    return "\n".join(lines) + "\n"


def _device(device: Device) -> Iterator[str]:
    for one in fields(device):
        value = getattr(device, one.name)
        if not value:
            continue
        if isinstance(value, str):
            yield f"{one.name} = {_word(value)}"
            continue
        ending, (unit, factor) = next(entry for entry in UNITS.items() if one.name.endswith(entry[1][0]))
        yield f"{one.name.removesuffix(unit)}{ending} = {_figure(value / factor)}"


def _speeds(speeds: Speeds) -> Iterator[str]:
    curves = speeds.curves
    assert curves is not None
    yield from (f"{name} = {_figure(getattr(speeds, name))}" for name in SPEED_SCALARS)
    widths = {width: name for name, width in WIDTHS.items()}
    grids = {widths[width]: grid for width, grid in curves.products.items()}
    grids |= {"passes": curves.passes, "update": curves.update}
    grids |= {"attention_forward_curve": curves.attention[0], "attention_backward_curve": curves.attention[1]}
    for name, grid in grids.items():
        yield f"{name} = {_grid(name, grid)}"


def _links(ranks: int, links: Links) -> Iterator[str]:
    assert links.curves is not None
    yield from (f"{name} = {_figure(getattr(links, name))}" for name in LINK_SCALARS)
    for size in sorted({size for _, size in links.curves.seconds}):
        yield f"[links.{ranks}.ranks_{size}]"
        for (name, of), grid in links.curves.seconds.items():
            if of == size:
                yield f"{name} = {_grid(name, grid)}"


def _grid(name: str, grid: RateGrid) -> str:
    *names, values = AXES[name]
    parts = [f"{key} = {_list(axis)}" for key, axis in zip(names, grid.axes, strict=True)]
    return "{ " + ", ".join([*parts, f"{values} = {_list(grid.values)}"]) + " }"


def _list(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(_figure(one) for one in numbers) + "]"


def _figure(value: float) -> str:
    return f"{value:.6g}" if "e" in f"{value:.6g}" or "." in f"{value:.6g}" else f"{value:.0f}"


def _word(value: str) -> str:
    return json.dumps(value, ensure_ascii=True)
