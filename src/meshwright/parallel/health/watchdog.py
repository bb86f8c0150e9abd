"""Ends all ranks when one dies, hangs or fails, and says once which, where and why.

Outside of the collective library: two daemon threads of each rank and their own connection to the launcher's store.
Once a second a rank writes its beat (pulse.py) and looks for a verdict; the first and the last rank read all beats, in
one request, and judge (verdict.py). Ranks of one machine hold each other's processes by pidfd and see a death at once.
Whoever claims the verdict first speaks; the others wait until it has spoken, and end with the same exit code.

    talker    all that asks the store
    guard     processes and signals; also ends this rank where the store does not answer any more
"""

import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

from meshwright.parallel.health.blame import ADVICE, Blame, Limits, died, judge, who
from meshwright.parallel.health.heartbeat import Beat, Heartbeat, HeartbeatWatch

BEAT_S = 1.0
READ_AT_ONCE = 256
"""Beats that are read with every beat; of more, each only every so many seconds."""
TOLD_S = 5.0
"""The one that speaks has so long; then the others end."""
LOST_S = 15.0
"""A rank that lost a connection waits so long for somebody who knows which rank is gone."""
GRACE_S = 1.0
"""After SIGTERM, where nothing is to be saved: time for a verdict that may be the reason of it."""
UNHEARD_S = 120.0
"""Ranks that have met are heard of within this: the second connection to the store may take half of it."""
LAST_S = 30.0
"""The first rank waits at the end so long for the others to be done."""
FAILED, TERMINATED = 1, 143
GONE = "the launcher's store does not answer: torchrun, or the machine it ran on, is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank lives."""

    rank: int
    world: int
    neighbours: tuple[int, ...] = ()
    """Ranks that the same launcher started on this machine, this one included."""
    host: str = ""
    """What the machine is called, where there are several."""


class Watchdog:
    """Watches the thread that makes it. `say` prints a line; `end` ends the process at once with an exit code;
    `queues` as of Watch.

    `store` and `main_store` are two connections to one store, for the watchdog's own threads and for all others.
    """

    def __init__(
        self,
        store: dist.Store,
        main_store: dist.Store,
        place: RankPlace,
        *,
        pulse: Heartbeat,
        phases: Mapping[str, str],
        reads: frozenset[str],
        limits: Limits,
        say: Callable[[str], None],
        end: Callable[[int], None],
        queues: bool = False,
    ) -> None:
        self.store, self.main_store, self.place, self.limits = store, main_store, place, limits
        self.say, self.end = say, end
        self.pulse, self.watch = pulse, HeartbeatWatch(pulse, phases, reads, queues=queues)
        self.beat = Beat(host=place.host, machine=_machine(), pid=os.getpid())
        self.beat_s = min(BEAT_S, limits.silent_s / 4)
        self._claims: queue.SimpleQueue[tuple[Blame, int]] = queue.SimpleQueue()
        self._dead: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._processes: dict[int, int] = {}
        self._last: Beat | None = None
        self._lost_s = self._verdict_s = 0.0
        self._code = FAILED
        self._met = False
        self._answered_s, self._cut_off = time.monotonic(), False
        self._due = threading.Event()
        self._closed = threading.Event()
        self._heard, self._bell = os.pipe()
        self._observed = _Observed(place.world) if place.rank in (0, place.world - 1) else None

    def start(self) -> None:
        """From the main thread, which alone may take signals."""
        os.set_blocking(self._bell, False)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _heeded_by_the_guard)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._guard)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The work is done: from now on this rank may be silent and end."""
        self._closed.set()
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _heeded_by_the_guard:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._due.set()
        os.write(self._bell, b"\0")
        for thread in self._threads:
            thread.join(TOLD_S)
        if self.place.rank == 0 and not self._cut_off:
            self._go_last()
        if not any(thread.is_alive() for thread in self._threads):
            for handle in (self._heard, self._bell, *self._processes):
                os.close(handle)

    def _go_last(self) -> None:
        """The first rank may keep the store: others that still want it would take its end for a failure."""
        keys = [_key(rank) for rank in range(self.place.world)]
        end_s = time.monotonic() + LAST_S
        with suppress(RuntimeError):
            while time.monotonic() < end_s and not self._all_done(keys):
                time.sleep(0.02)

    def _all_done(self, keys: list[str]) -> bool:
        return self.store.check(keys) and all(Beat.decode(text).done for text in self.store.multi_get(keys))

    def failed(self, sentence: str, code: int) -> None:
        """This rank failed: one rank says so, all end. Does not come back, unless `end` does."""
        self._claims.put((Blame(self.place.rank, sentence), code))
        self._wait_for_the_end(sentence, code)

    def lost(self, reason: str, trace: TracebackType | None) -> None:
        """A collective failed here because another rank is gone: all end, with the one who is to blame named."""
        self._last = replace(self.watch.after(trace), lost=reason)
        self._lost_s = time.monotonic()
        self._wait_for_the_end(self._own_loss(self._last).sentence, FAILED)

    def _wait_for_the_end(self, sentence: str, code: int) -> None:
        """The talker and the guard end this process; if they cannot, so does this."""
        self._due.set()
        self._closed.wait(LOST_S + 3 * TOLD_S)
        self.say(sentence)
        self.end(code)

    def _own_loss(self, beat: Beat) -> Blame:
        rank = self.place.rank
        return Blame(rank, f"{who(rank, self.beat)} lost the others at {beat.place}: {beat.lost}")

    # the talker

    def _talk(self) -> None:
        try:
            while not self._closed.is_set():
                self._once()
                self._answered_s = time.monotonic()
                self._due.wait(self.beat_s)
                self._due.clear()
            self.store.set(_key(self.place.rank), replace(self.beat, done=True).encode())
        except RuntimeError:  # what a store raises: the connection is closed, an answer took too long
            self._cut_off = True
        except Exception as error:  # ours to mend; said as what it is, since nobody watches this rank any more
            self.say(f"the watchdog of rank {self.place.rank} failed: {type(error).__name__}: {error}")
            self.end(FAILED)

    def _once(self) -> None:
        own, seen = self.beat, self._last or self.watch.look()
        self.beat = replace(seen, count=own.count + 1, host=own.host, machine=own.machine, pid=own.pid)
        self.store.set(_key(self.place.rank), self.beat.encode())
        if self.store.check(["verdict"]):
            self._obey(self.store.get("verdict"))
        while not self._claims.empty():
            self._claim(*self._claims.get())
        while not self._dead.empty():
            rank = self._dead.get()
            beat = Beat.decode(self.store.get(_key(rank)))
            if not beat.done:
                self._claim(died(rank, beat, self.place.rank, self.beat), FAILED)
        self._meet_neighbours()
        seen_all = self._observed
        if seen_all is not None and self.beat.count % seen_all.every == 0:
            found = seen_all.look(self.store, self.limits)
            if found is not None:
                self._claim(found, FAILED)
        if self._last is not None and time.monotonic() > self._lost_s + LOST_S:
            self._claim(self._own_loss(self._last), FAILED)

    def _claim(self, verdict: Blame, code: int) -> None:
        """Speak, if nobody has; else wait for those who do."""
        mine = json.dumps([self.place.rank, verdict.rank, verdict.sentence, code])
        found = self.store.compare_set("verdict", "", mine)
        if found.decode() != mine:
            self._obey(found)
            return
        self._code, self._verdict_s = code, time.monotonic()
        self.say(verdict.sentence)
        self.store.set("told", "")
        self._kill(verdict.rank)
        # Last, so that no launcher ends another rank before it has ended itself with the right exit code.
        limit = self._verdict_s + (GRACE_S if code == FAILED else TOLD_S)
        while self.store.add("ended", 0) < self.place.world - 1 and time.monotonic() < limit:
            time.sleep(0.02)
        self.end(code)

    def _obey(self, found: bytes) -> None:
        speaker, blamed, _, self._code = json.loads(found)
        self._verdict_s = time.monotonic()
        while not self.store.check(["told"]) and time.monotonic() < self._verdict_s + TOLD_S:
            time.sleep(0.02)
        if blamed != speaker:
            self._kill(blamed)
        self.store.add("ended", 1)
        self.end(self._code)

    def _kill(self, rank: int) -> None:
        """A neighbour that stands still may be deaf to everything else, and a launcher gives it half a minute."""
        for handle, neighbour in list(self._processes.items()):
            if neighbour == rank:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)

    def _meet_neighbours(self) -> None:
        """Once, when all have beaten: hold their processes."""
        others = [rank for rank in self.place.neighbours if rank != self.place.rank]
        keys = [_key(rank) for rank in others]
        if self._met or not others or not hasattr(os, "pidfd_open") or not self.store.check(keys):
            return
        self._met = True
        for rank, text in zip(others, self.store.multi_get(keys), strict=True):
            beat = Beat.decode(text)
            if beat.machine == self.beat.machine and not beat.done:
                try:
                    self._processes[os.pidfd_open(beat.pid)] = rank
                except ProcessLookupError:
                    self._dead.put(rank)
                    self._due.set()
        os.write(self._bell, b"\0")

    # the guard

    def _guard(self) -> None:
        terminated_s = 0.0
        dead: set[int] = set()
        while not self._closed.is_set():
            found, terminated = self._hear(dead)
            dead |= found
            now = time.monotonic()
            # Asked at once: who saves now has heard the signal, and ends by itself; who begins to later has not.
            terminated_s = terminated_s or now * (terminated and _nobody_saves())
            if self._verdict_s:
                if now > self._verdict_s + 2 * TOLD_S:  # the store answers no more, or a pipe is full
                    self.end(self._code)
            elif terminated_s and now > terminated_s + GRACE_S and not self._lost_s:
                self.end(TERMINATED)
            elif self._cut_off or now > self._answered_s + self.limits.silent_s:
                if self.place.rank == min(set(self.place.neighbours) - dead, default=self.place.rank):
                    self.say(f"{GONE}; rank {self.place.rank} was at {self.beat.place}")
                self.end(FAILED)

    def _hear(self, dead: set[int]) -> tuple[set[int], bool]:
        """(neighbours that have just died, whether SIGTERM came), after a beat at the latest."""
        watched = {handle: rank for handle, rank in list(self._processes.items()) if rank not in dead}
        poll = select.poll()
        for handle in (self._heard, *watched):
            poll.register(handle, select.POLLIN)
        ready = [handle for handle, _ in poll.poll(1000 * self.beat_s)]
        found = {watched[handle] for handle in ready if handle in watched}
        for rank in found:
            self._dead.put(rank)
            self._due.set()
        return found, self._heard in ready and signal.SIGTERM in os.read(self._heard, 64)


class _Observed:
    """All beats, as one rank sees them: for how long each has not changed. 1024 of them take 15 ms to read."""

    def __init__(self, world: int) -> None:
        self.every = 1 + world // READ_AT_ONCE
        self.keys = [_key(rank) for rank in range(world)]
        self.counts = [-1] * world
        self.silent_s = [0.0] * world
        self.met_s, self.looked_s = time.monotonic(), 0.0

    def look(self, store: dist.Store, limits: Limits) -> Blame | None:
        """One request for all; before all are there nobody is judged but who does not come."""
        if not self.looked_s and not store.check(self.keys):
            waited = time.monotonic() - self.met_s
            return self._unheard(store, waited) if waited > max(UNHEARD_S, limits.silent_s) else None
        beats = [Beat.decode(text) for text in store.multi_get(self.keys)]
        self.note([beat.count for beat in beats], time.monotonic())
        return judge(beats, self.silent_s, limits)

    def _unheard(self, store: dist.Store, waited_s: float) -> Blame | None:
        """A rank that ended between the meeting and its first beat: no launcher may have been there to see it."""
        missing = next((rank for rank, key in enumerate(self.keys) if not store.check([key])), None)
        if missing is None:
            return None
        sentence = f"rank {missing} met the others {waited_s:.0f} s ago and was not heard of since; {ADVICE}"
        return Blame(missing, sentence)

    def note(self, counts: Sequence[int], now_s: float) -> None:
        """A pause of this rank itself (it was stopped, too) counts as two looks at most."""
        passed = min(now_s - self.looked_s, 2 * BEAT_S * self.every)
        self.silent_s = [
            s + passed if count == before else 0.0
            for s, count, before in zip(self.silent_s, counts, self.counts, strict=True)
        ]
        self.counts, self.looked_s = list(counts), now_s


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _heeded_by_the_guard(number: int, frame: FrameType | None) -> None:
    """SIGTERM where nothing can be saved yet, or any more. The main thread may be deaf: the guard hears it."""


def _nobody_saves() -> bool:
    """Whether nobody in this process ends in good order on SIGTERM (training.interrupt does)."""
    return signal.getsignal(signal.SIGTERM) is _heeded_by_the_guard


def _machine() -> str:
    """Equal for processes that see each other: boot and process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{os.uname().nodename}"
