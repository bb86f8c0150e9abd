"""`doctor`: all its checks in order, in one process or on every rank of a launched world."""

import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.verbs.doctor import engine, machine, network
from meshwright.verbs.doctor.findings import Check, Finding, State, merge_ranks, run_check, verdict

Say = Callable[[str], None]
LINKS_S = 60.0
"""Time limit of the measurement of links on this machine, in seconds."""
Checks = list[tuple[str, Check]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings of all checks."""

    findings: tuple[Finding, ...]
    ranks: int
    node_names: tuple[str, ...]
    """Host names by node number. They are only shown on the screen; no document holds them."""
    seconds: float

    @property
    def verdict(self) -> State:
        """The worst state of all checks."""
        return verdict(self.findings)

    def document(self) -> dict[str, Any]:
        """Return the examination as JSON without host names, fit to be sent."""
        return {
            "verdict": self.verdict,
            "checks": [finding.document() for finding in self.findings],
            "ranks": self.ranks,
            "nodes": len(self.node_names),
            "seconds": round(self.seconds, 1),
            "meshwright": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        }


def examine(
    folder: Path, *, world: Group | None = None, quick: bool = False, say: Say = lambda text: None
) -> Examination:
    """Run every check.

    Args:
        folder: Folder of runs.
        world: Ranks of a launch, all of which must call this. None = this process alone.
        quick: Skip checks that start processes or train.
    """
    began = time.perf_counter()
    world = world or Group("world")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    names = network.gather_from_all(world, socket.gethostname())
    nodes = network.node_numbers(names)
    checks: Checks = [
        *_machine_checks(folder, gpu),
        *_kernel_checks(device),
        ("checkpoint", partial(engine.check_checkpoint, device, folder, world)),
    ]
    if world.index:
        say = _silent  # the first rank speaks for all
    local = _run_checks(checks, say)
    # Checks of one machine run on all ranks, since one bad node of many is what people look for.
    findings = merge_ranks(network.gather_from_all(world, local), nodes)
    findings += _check_world(world, device, nodes, local, say) if world.size > 1 else _check_locally(device, quick, say)
    return Examination(
        findings=tuple(findings), ranks=world.size, node_names=tuple(dict.fromkeys(names)),
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def _machine_checks(folder: Path, gpu: bool) -> Checks:
    return [
        ("versions", machine.check_versions),
        ("cores", machine.check_cores),
        ("memory", machine.check_memory),
        ("shared memory", machine.check_shared_memory),
        ("open files", machine.check_open_files),
        ("disk", partial(machine.check_disk, folder)),
        ("other programs", machine.check_other_programs),
        ("GPUs", lambda: machine.check_gpus(machine.read_build())),
        ("communication", partial(machine.check_libraries, gpu)),
        ("compiler", partial(machine.check_compiler, gpu)),
        ("device preset", partial(machine.check_preset, gpu)),
    ]


def _kernel_checks(device: torch.device) -> Checks:
    low = torch.bfloat16
    return [
        ("attention", partial(engine.check_attention, device, low)),
        ("attention by parts", partial(engine.check_flash_parts, device, low)),
        ("experts", partial(engine.check_experts, device, low)),
        ("loss", partial(engine.check_loss, device, low)),
        ("products", partial(engine.check_products, device, low if device.type == "cuda" else torch.float32)),
    ]


def _check_locally(device: torch.device, quick: bool, say: Say) -> list[Finding]:
    """Run the checks that start several processes on this machine, or train."""
    kind = device.type
    most = torch.cuda.device_count() if kind == "cuda" else 2
    # The cheap check comes first; the others start processes and take most of the two minutes.
    checks: Checks = [("links", partial(_check_local_links, kind, most))]
    if not quick:
        checks += [
            ("schedules", partial(engine.check_schedules, kind, most)),
            ("axes", partial(engine.check_axes, kind, most)),
            ("step", partial(engine.check_step_speed, device)),
            ("4-bit products", partial(engine.check_quantized_products, device)),
        ]
    return _run_checks(checks, say)


def _run_checks(checks: Checks, say: Say) -> list[Finding]:
    findings = []
    for name, check in checks:
        say(name)
        findings.append(run_check(name, check))
    return findings


def _check_local_links(kind: str, most: int) -> Finding:
    """Measure links between processes of this machine: one per GPU, or two on a CPU."""
    if most < 2:
        return network.judge_links([], [])
    ranks = on_ranks(most, _measure_links, kind, limit_s=LINKS_S, device=kind)
    # Links are compared only where collectives give the right numbers.
    wrong = next((finding for finding, _ in ranks if finding.state != "ok"), None)
    return wrong or network.judge_links(ranks[0][1], [0] * most)


def _measure_links(kind: str) -> tuple[Finding, list[network.NetworkLink]]:
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    size, rank = dist.get_world_size(), dist.get_rank()
    world = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    return network.check_collectives(world, device), network.measure_links(world, device)


def _check_world(
    world: Group, device: torch.device, nodes: Sequence[int], local: Sequence[Finding], say: Say
) -> list[Finding]:
    say("collectives")
    collectives = run_check("collectives", lambda: network.check_collectives(world, device))
    merged = merge_ranks(network.gather_from_all(world, [collectives]), nodes)
    say("links")
    link_finding = run_check("links", lambda: network.judge_links(network.measure_links(world, device), nodes))
    rate = next(
        # The check of products has measured the rate of this rank already.
        (float(finding.figures.get("flop_per_s", 0.0)) for finding in local if finding.check == "products"),
        0.0,
    )
    rates = network.gather_from_all(world, rate)
    return [*merged, link_finding, run_check("equal ranks", lambda: network.judge_ranks(rates, nodes))]


def _silent(text: str) -> None:
    pass
