"""Findings of checks, and how the findings of several ranks become one list."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

State = Literal["ok", "warning", "failure", "skipped"]
WORST: tuple[State, ...] = ("failure", "warning", "ok", "skipped")
"""States from the worst to the best."""
SHOWN = 5
"""Ranks that are listed by number before `and N more`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one check: a sentence about the machine, and advice where something is wrong."""

    check: str
    state: State
    observation: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the finding as JSON, where the observation is called `found`."""
        return {"found" if name == "observation" else name: content for name, content in asdict(self).items()}


def ok(check: str, observation: str, **figures: Any) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check=check, state="ok", observation=observation, figures=figures)


def warning(check: str, observation: str, advice: str, **figures: Any) -> Finding:
    """Return a finding that slows training or puts it at risk."""
    return Finding(check=check, state="warning", observation=observation, advice=advice, figures=figures)


def failure(check: str, observation: str, advice: str, **figures: Any) -> Finding:
    """Return a finding that makes training fail, hang or compute something wrong."""
    return Finding(check=check, state="failure", observation=observation, advice=advice, figures=figures)


def skipped(check: str, reason: str) -> Finding:
    """Return the finding of a check that does not apply here."""
    return Finding(check=check, state="skipped", observation=reason)


Check = Callable[[], Finding]


def run_check(name: str, check: Check) -> Finding:
    """Run a check and time it. A check that raises becomes a failure with its message."""
    began = time.perf_counter()
    try:
        finding = check()
    except Exception as error:
        # The last line of an error with several lines usually names the cause.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]
        finding = failure(
            name, f"the check itself failed: {message}", "run with --debug for the traceback, and report it"
        )
    return replace(finding, seconds=round(time.perf_counter() - began, 2))


def verdict(findings: Sequence[Finding]) -> State:
    """Return the worst state of all findings."""
    return min((finding.state for finding in findings), key=WORST.index, default="ok")


def merge_ranks(ranks: Sequence[Sequence[Finding]], nodes: Sequence[int]) -> list[Finding]:
    """Merge the findings of all ranks into one per check, keeping the worst. Ranks that differ are named."""
    merged = []
    # Every rank ran the same checks in the same order, so columns belong together.
    for findings in zip(*ranks, strict=True):
        worst = verdict(findings)
        worst_ranks = [rank for rank, finding in enumerate(findings) if finding.state == worst]
        finding_of_worst = replace(findings[worst_ranks[0]], seconds=max(finding.seconds for finding in findings))
        # A finding that all ranks share is one of the cluster and needs no rank numbers.
        if len(worst_ranks) < len(findings):
            finding_of_worst = replace(
                finding_of_worst, observation=f"{name_ranks(worst_ranks, nodes)}: {finding_of_worst.observation}"
            )
        merged.append(finding_of_worst)
    return merged


def name_ranks(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """Name ranks: `rank 3 (node 1)`, `ranks 3 (node 1), 4 (node 1) and 12 more`; nodes only if there are several."""
    several = len(set(nodes)) > 1
    shown = [f"{rank} (node {nodes[rank]})" if several else str(rank) for rank in ranks[:SHOWN]]
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}{more}"
