"""What a check found, and how the findings of several ranks become one list."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

State = Literal["ok", "warning", "failure", "skipped"]
WORST: tuple[State, ...] = ("failure", "warning", "ok", "skipped")
"""From the worst on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. `found` is a sentence about the machine, `advice` what to do where that is not well."""

    check: str
    state: State
    found: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def ok(check: str, found: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding(check=check, state="ok", found=found, figures=figures)


def warning(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """Training runs, but slower than it could, or with a risk."""
    return Finding(check=check, state="warning", found=found, advice=advice, figures=figures)


def failure(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """Training would fail, hang or compute something wrong."""
    return Finding(check=check, state="failure", found=found, advice=advice, figures=figures)


def skipped(check: str, why: str) -> Finding:
    """Not tried here, and why."""
    return Finding(check=check, state="skipped", found=why)


Check = Callable[[], Finding]


def examined(name: str, check: Check) -> Finding:
    """The finding of a check with its seconds. A check that breaks is a failure, with what it raised."""
    began = time.perf_counter()
    try:
        found = check()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]
        found = failure(name, f"the check itself failed: {said}", "run with --debug for the traceback, and report it")
    return replace(found, seconds=round(time.perf_counter() - began, 2))


def verdict(findings: Sequence[Finding]) -> State:
    """The worst of all."""
    return min((one.state for one in findings), key=WORST.index, default="ok")


def merged(ranks: Sequence[Sequence[Finding]], nodes: Sequence[int]) -> list[Finding]:
    """One finding for each check of all ranks, the worst state; ranks that differ from the others are named."""
    return [_merged(found, nodes) for found in zip(*ranks, strict=True)]


def _merged(found: Sequence[Finding], nodes: Sequence[int]) -> Finding:
    worst = verdict(found)
    some = [rank for rank, one in enumerate(found) if one.state == worst]
    first = replace(found[some[0]], seconds=max(one.seconds for one in found))
    if len(some) == len(found):
        return first
    return replace(first, found=f"{named_ranks(some, nodes)}: {first.found}")


SHOWN = 5


def named_ranks(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """`rank 3 (node 1)`, `ranks 3 (node 1), 4 (node 1) and 12 more`; without nodes where there is one."""
    several = len(set(nodes)) > 1
    shown = [f"{rank} (node {nodes[rank]})" if several else str(rank) for rank in ranks[:SHOWN]]
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}{more}"
