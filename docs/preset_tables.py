"""Tables of the known devices and models, from the presets: every figure with its source."""

import tomllib
from importlib.resources import files

from meshwright.spec import presets
from meshwright.spec.units import count


def devices() -> str:
    """One row for each, `-` = not known."""
    lines = [
        "| name | memory, GiB | 16-bit peak, TFLOP/s | best product measured | fp8 peak | fp8 measured | memory, GB/s "
        "| link, GB/s | network, GB/s | watts | runs the engine |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in presets.device_names():
        device = presets.device(name)
        if not device.memory_bytes:
            continue
        half = f"{device.half_flop_per_s / 1e12:,.4g}" + ("" if device.bf16_flop_per_s else " (fp16)")
        rates = (device.half_matmul_flop_per_s, device.fp8_flop_per_s, device.fp8_matmul_flop_per_s)
        speeds = device.memory_bytes_per_s, device.link_bytes_per_s, device.network_bytes_per_s
        cells = [f"`{name}`", f"{device.memory_bytes / 2**30:g}", half, *(_number(rate / 1e12) for rate in rates)]
        cells += [_number(speed / 1e9) for speed in speeds] + [
            _number(device.watts),
            "plan only" if device.plan_only else "yes",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def device_sources() -> str:
    """Where the figures of each stand, and how sure they are."""
    lines = ["| name | source | certainty | watts from |", "|---|---|---|---|"]
    for name in presets.device_names():
        device = presets.device(name)
        if device.memory_bytes:
            lines.append(
                f"| `{name}` | {device.source} | {device.certainty} | {device.watts_source or 'not published'} |"
            )
    return "\n".join(lines) + "\n"


def machines() -> str:
    """One row for each node that is sold under a name of its own."""
    lines = ["| names | devices | network of a device, GB/s | source | certainty |", "|---|---|---|---|---|"]
    for sold in presets.machines():
        names = ", ".join(f"`{name}`" for name in sold.names)
        network = _number(sold.network_bytes_per_s / 1e9)
        lines.append(f"| {names} | `{sold.device}x{sold.devices}` | {network} | {sold.source} | {sold.certainty} |")
    return "\n".join(lines) + "\n"


def models() -> str:
    """One row for each, file by file."""
    lines = ["| name | parameters | published | the engine trains it |", "|---|---|---|---|"]
    for entry in sorted(files(presets).joinpath("models").iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".toml"):
            continue
        for name in tomllib.loads(entry.read_text(encoding="utf-8"))["models"]:
            known, shape = presets.published(name), presets.model(name)
            missing = shape.plan_only.replace("plan only: the engine does not have", "plan only, without")
            lines.append(f"| `{name}` | {count(known.parameters)} | {known.parameters_source} | {missing or 'yes'} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.4g}" if value else "-"
