"""All checks in their order, on one process or on every rank of a launched world."""

import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.observe.doctor import accelerator, kernel_checks, network, system, training
from meshwright.observe.doctor.findings import Check, Finding, State, examined, merged, verdict
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.group import Group

Say = Callable[[str], None]
LINKS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What all checks found."""

    findings: tuple[Finding, ...]
    ranks: int
    node_names: tuple[str, ...]
    """By number of the node; for the screen only, no document holds them."""
    seconds: float

    @property
    def verdict(self) -> State:
        """The worst state of all checks."""
        return verdict(self.findings)

    def document(self) -> dict[str, Any]:
        """As JSON, without names of machines: a file that can be sent."""
        return {
            "verdict": self.verdict,
            "checks": [asdict(one) for one in self.findings],
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
    """Every check. `folder` is where runs are kept; `world` the ranks of a launch, all of which must call this. `quick`
    leaves out what starts processes or trains."""
    began = time.perf_counter()
    world = world or Group("world")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    names = network.of_all(world, socket.gethostname())
    nodes = network.node_numbers(names)
    every: Checks = [
        *_machine(folder, gpu),
        *_kernels(device),
        ("checkpoint", partial(training.round_trip, device, folder, world)),
    ]
    own = _all(every, say if world.index == 0 else _silent)
    found = merged(network.of_all(world, own), nodes)
    found += _world(world, device, nodes, own, say) if world.size > 1 else _local(device, quick, say)
    return Examination(
        findings=tuple(found), ranks=world.size, node_names=tuple(dict.fromkeys(names)),
        seconds=time.perf_counter() - began,
    )  # fmt: skip


Checks = list[tuple[str, Check]]


def _machine(folder: Path, gpu: bool) -> Checks:
    return [
        ("versions", system.versions),
        ("cores", system.cores),
        ("memory", system.memory),
        ("shared memory", system.shared_memory),
        ("open files", system.open_files),
        ("disk", partial(system.disk, folder)),
        ("other programs", system.other_programs),
        ("GPUs", lambda: accelerator.gpus(accelerator.build())),
        ("communication", partial(accelerator.libraries, gpu)),
        ("compiler", partial(accelerator.compiler, gpu)),
        ("device preset", partial(accelerator.known_figures, gpu)),
    ]


def _kernels(device: torch.device) -> Checks:
    low = torch.bfloat16
    return [
        ("attention", partial(kernel_checks.attention, device, low)),
        ("attention by parts", partial(kernel_checks.flash_parts, device, low)),
        ("experts", partial(kernel_checks.experts, device, low)),
        ("loss", partial(kernel_checks.loss, device, low)),
        ("products", partial(kernel_checks.products, device, low if device.type == "cuda" else torch.float32)),
    ]


def _local(device: torch.device, quick: bool, say: Say) -> list[Finding]:
    """What takes several processes of this machine, or trains."""
    kind = device.type
    most = torch.cuda.device_count() if kind == "cuda" else 2
    checks: Checks = [("links", partial(_links_here, kind, most))]
    if not quick:
        checks += [
            ("schedules", partial(training.schedules, kind, most)),
            ("axes", partial(training.axes, kind, most)),
            ("step", partial(training.step_speed, device)),
            ("4-bit products", partial(kernel_checks.quantized_products, device)),
        ]
    return _all(checks, say)


def _all(checks: Checks, say: Say) -> list[Finding]:
    found = []
    for name, check in checks:
        say(name)
        found.append(examined(name, check))
    return found


def _links_here(kind: str, most: int) -> Finding:
    """Between processes of this machine: one for each GPU, or two on a CPU."""
    if most < 2:
        return network.judged_links([], [])
    ranks = on_ranks(most, _measured, kind, limit_s=LINKS_S, device=kind)
    wrong = next((found for found, _ in ranks if found.state != "ok"), None)
    return wrong or network.judged_links(ranks[0][1], [0] * most)


def _measured(kind: str) -> tuple[Finding, list[network.NetworkLink]]:
    """On a rank: collectives, then links."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    size, rank = dist.get_world_size(), dist.get_rank()
    world = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    return network.collectives(world, device), network.measured_links(world, device)


def _world(world: Group, device: torch.device, nodes: Sequence[int], own: Sequence[Finding], say: Say) -> list[Finding]:
    """What ranks of a launch are to each other."""
    tell = say if world.index == 0 else _silent
    tell("collectives")
    right = merged(network.of_all(world, [examined("collectives", lambda: network.collectives(world, device))]), nodes)
    tell("links")
    between = examined("links", lambda: network.judged_links(network.measured_links(world, device), nodes))
    rate = next((float(one.figures.get("flop_per_s", 0.0)) for one in own if one.check == "products"), 0.0)
    rates = network.of_all(world, rate)
    return [*right, between, examined("equal ranks", lambda: network.judged_ranks(rates, nodes))]


def _silent(text: str) -> None:
    pass
