"""What the watchdog costs a rank: a beat once a second, the reading of all beats, the count of a collective.

python -m benchmarks.watchdog [--json]
"""

import argparse
import json
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from meshwright.parallel.health.blame import Limits
from meshwright.parallel.health.heartbeat import Beat, Heartbeat, HeartbeatWatch
from meshwright.parallel.health.watchdog import _Observed
from meshwright.training.phases import PHASES, READS

DEEP = 40
"""Frames of the watched thread: about those of a training step."""


def measure() -> dict[str, float]:
    """Seconds of each."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    pulse = Heartbeat()
    watch = HeartbeatWatch(pulse, PHASES, READS)

    def beat() -> None:
        store.set("beat/0", watch.look().encode())
        store.check(["verdict"])

    found = {"beat_s": _below(DEEP, lambda: _elsewhere(lambda: _each(beat, 500)))}
    for world in (8, 1024):
        for rank in range(world):
            store.set(f"beat/{rank}", Beat(count=1).encode())
        observed = _Observed(world)
        found[f"read_{world}_s"] = _each(lambda seen=observed: seen.look(store, Limits()), 10)  # type: ignore[misc]
    found["count_s"] = _each(lambda: pulse.calls.tell("data", "all_reduce", 8), 100_000)
    return found


def _each(do: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        do()
    return (time.perf_counter() - began) / times


def _elsewhere(do: Callable[[], float]) -> float:
    """In another thread, while this one stands still."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(do()))
    thread.start()
    thread.join()
    return found[0]


def _below(frames: int, do: Callable[[], float]) -> float:
    return do() if frames == 0 else _below(frames - 1, do)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found))
    else:
        for name, seconds in found.items():
            print(f"{name.removesuffix('_s'):<10} {1e6 * seconds:10.1f} us")


if __name__ == "__main__":
    main()
