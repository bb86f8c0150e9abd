"""What was measured, where and when: docs/claims.json keeps it, docs/claims.md shows it."""

import contextlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from claims.table import Claim, ClaimsError
from meshwright import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "trl")
VECTORS = (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16"), ("avx512f", "AVX512"), ("avx2", "AVX2"))
"""Flag of Linux -> instructions, the widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The last measurement of one claim. Whether it holds is not stored: the bar of the day decides."""

    id: str
    command: str
    read: str
    figure: float | None
    error: str
    date: str
    machine: str
    versions: str

    def belongs_to(self, claim: Claim) -> bool:
        """A figure made by another command, or read elsewhere, is no figure of this claim."""
        return (self.id, self.command, self.read) == (claim.id, claim.command, claim.read)

    def holds(self, claim: Claim) -> bool:
        """Whether the claim holds by this measurement."""
        return self.figure is not None and claim.bar.holds(self.figure)


def machine() -> str:
    """Processor, cores, memory and accelerators of this machine, without its name."""
    parts = [
        _processor(),
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores",
    ]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    return ", ".join([*parts, *_accelerators()])


def versions() -> str:
    """Python and the packages that make the figures."""
    names = [f"Meshwright {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            names.append(f"{package} {metadata.version(package)}")
    return ", ".join(names)


def load(path: Path) -> dict[str, Record]:
    """Kept records by id; empty when there are none yet."""
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["records"]
        return {row["id"]: Record(**row) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ClaimsError(f"{path.name} is damaged ({error}): delete it and measure again") from error


def save(claims: Iterable[Claim], records: Mapping[str, Record], folder: Path) -> None:
    """Write claims.json and claims.md; each appears whole or not at all."""
    rows = list(claims)
    measured = [records[claim.id] for claim in rows if claim.id in records]
    text = json.dumps({"records": [asdict(record) for record in measured]}, indent=1)
    _replace(folder / "claims.json", text + "\n")
    _replace(folder / "claims.md", page(rows, records))


def page(claims: list[Claim], records: Mapping[str, Record]) -> str:
    """The table of claims as Markdown."""
    machines = sorted({record.machine for record in records.values()})
    lines = [
        "# Claims",
        "",
        "Every figure the documentation states, with the command that makes it, its bar, and what was last measured.",
        "Written by `make claims` (`SLOW=1` adds the long rows, `ONLY=id` measures one): edit `claims/claims.toml`,",
        "not this page. A row that was not run keeps its last figure and date.",
        "",
        "| claim | bar | measured | holds | date | machine |",
        "|---|---|---|---|---|---|",
    ]
    for claim in claims:
        record = records.get(claim.id)
        seen = (
            (_figure(claim, record), "yes" if record.holds(claim) else "**no**", record.date)
            if record
            else ("not measured yet", "", "")
        )
        letter = _letter(machines.index(record.machine)) if record else ""
        text = f"{claim.text} (`{claim.id}`{', slow' if claim.slow else ''})"
        lines.append("| " + " | ".join([text, _bar(claim), *seen, letter]) + " |")
    lines += ["", "## Machines", ""]
    lines += [f"- {_letter(i)}: {name}" for i, name in enumerate(machines)]
    lines += ["", "## Commands", "", "| claim | command | read | versions |", "|---|---|---|---|"]
    for claim in claims:
        known = records[claim.id].versions if claim.id in records else ""
        lines.append(f"| {claim.id} | `{claim.command}` | {claim.read} | {known} |")
    return "\n".join(lines) + "\n"


def _bar(claim: Claim) -> str:
    return "succeeds" if claim.read == "exit status" else f"{claim.bar} {claim.unit}".strip()


def _figure(claim: Claim, record: Record) -> str:
    if claim.read == "exit status" and record.figure is not None:
        return "succeeded" if record.figure == 0 else f"failed: {record.error}".replace("|", "/")
    if record.figure is None:
        return f"none: {record.error}".replace("|", "/")
    return f"{record.figure:.4g} {claim.unit}".strip()


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"M{index}"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _processor() -> str:
    """Name of the processor, with its family, model and widest vectors: hypervisors give several of them one name."""
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    name = lines.get("model name") or platform.processor() or platform.machine()
    flags = lines.get("flags", "").split()
    details = [f"{key.removeprefix('cpu ')} {lines[key]}" for key in ("cpu family", "model") if key in lines]
    details += [text for flag, text in VECTORS if flag in flags][:1]
    return f"{name} ({', '.join(details)})" if details else name


def _accelerators() -> list[str]:
    """Names of NVIDIA devices, asked from the driver's own tool where it is installed."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    asked = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    names = asked.stdout.strip().splitlines() if asked.returncode == 0 else []
    return [f"{names.count(name)}x {name}" for name in sorted(set(names))]
