"""Published failure rates of devices, and the cost of a failure with this engine.

A rate is unexpected interruptions per device-hour. Llama 3's is the default: it is the largest count, and the only one
that lists the causes.
"""

from dataclasses import dataclass

HOUR_S, DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Report of one run."""

    name: str
    interruptions: float
    devices: int
    days: float
    source: str

    @property
    def mtbf_device_hours(self) -> float:
        """Mean hours of one device between interruptions."""
        return self.devices * self.days * 24 / self.interruptions


LLAMA_3 = FailureRecord(
    name="Llama 3 405B", interruptions=419, devices=16_384, days=54,
    source="arXiv:2407.21783, section 3.3.4 and table 5: 419 unexpected interruptions in 54 days",
)  # fmt: skip
OPT = FailureRecord(
    name="OPT-175B", interruptions=105, devices=992, days=60,
    source="arXiv:2205.01068: 35 manual restarts and an estimated 70 automatic ones in two months (recalled)",
)  # fmt: skip
BLOOM = FailureRecord(
    name="BLOOM 176B", interruptions=1.5, devices=384, days=7,
    source="arXiv:2211.05100: one or two GPU failures a week on 384 GPUs (recalled)",
)  # fmt: skip
RECORDS = (LLAMA_3, OPT, BLOOM)
HARDWARE = 0.78
"""Share of interruptions after which a node is replaced: confirmed or suspected hardware (Llama 3, section 3.3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a run of weeks. Answers name the defaults."""

    mtbf_device_hours: float = LLAMA_3.mtbf_device_hours
    hardware: float = HARDWARE
    restart_s: float = 180.0
    """Time from a failure to the first step, without reading the checkpoint. Also the time before the first step.

    A death is detected within a second and a hang within 5 minutes (docs/failures.md). Ranks start and compile for 20
    to 90 s.
    """
    repair_s: float = DAY_S
    """Time until a failed node comes back."""
    storage_bytes_per_s: float = 2e9
    """Bandwidth of each node to and from the storage of checkpoints."""
    evaluation: float = 0.01
    """Share of the steps' time that evaluations take."""
    spares: int | None = None
    """Nodes beyond those that train. None = as many as make the run cheapest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Cost of a checkpoint."""

    total_bytes: float
    stall_s: float
    """Time that training waits: until the fullest rank's part is copied to its host."""
    write_s: float
    """Time that a thread then writes. The checkpoint counts only afterwards."""


def saves_of(rank_bytes: float, total_bytes: float, nodes: int, host_bytes_per_s: float, storage: float) -> Saves:
    """Return the cost of a checkpoint. If the bandwidth to the host is unknown, training waits for the write."""
    write_s = total_bytes / (nodes * storage)
    stall_s = rank_bytes / host_bytes_per_s if host_bytes_per_s else write_s
    return Saves(total_bytes=total_bytes, stall_s=stall_s, write_s=write_s)


def erlang_b(places: int, load: float) -> float:
    """Return the share of the time in which all places are taken under a mean load (A. K. Erlang 1917)."""
    share = 1.0
    for number in range(1, places + 1):
        share = load * share / (number + load * share)
    return share
