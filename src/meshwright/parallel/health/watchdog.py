"""Watchdog: ends all ranks when one dies, hangs or fails, and says once which, where and why.

It runs outside of the collective library: two daemon threads of each rank, with their own connection to the launcher's
store. Once a second a rank writes its beat (heartbeat.py) and looks for a verdict. The first and the last rank read all
beats in one request, and judge (judgement.py). Ranks of one machine hold each other's processes by pidfd and see a
death at once. The rank that claims the verdict first prints it. The others wait until it has, and end with the same
exit code.

    talker    all requests to the store
    guard     processes and signals; also ends this rank if the store stops answering

Before that, ranks meet: the processes that a launcher has started find each other, and nothing that an earlier attempt
left. torchrun keeps one store for all attempts of a run (2.11 to 2.13). After a restart, a process group that is made
in it reads the addresses of dead processes. The attempt's number does not tell attempts apart (nodes count for
themselves), and the launcher says nothing else. So each rank writes a new random word, and rank 0 answers each word
with the name of the attempt. All that follows is stored under that name.
"""

import json
import os
import queue
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from types import FrameType, TracebackType

import torch.distributed as dist

from meshwright.parallel.health.heartbeat import Beat, HeartbeatWatch, namespace_id
from meshwright.parallel.health.judgement import ADVICE, Blame, Limits, SlowRanks, judge, name_rank
from meshwright.spec.errors import RunError

PAUSE_S = 0.02
SHOWN = 5
"""Ranks that a sentence names one by one."""


def meet(store: dist.Store, rank: int, world: int, limit_s: float) -> str:
    """Return the name of this attempt, the same on all ranks that are here now.

    Costs rank 0 two small requests for each other rank and look, the others two in all. Raises RunError when some ranks
    do not come in time.
    """
    if rank == 0:
        return _welcome(store, world, limit_s)
    word = secrets.token_hex(8)
    store.set(f"hello/{rank}", word)
    try:
        store.wait([f"welcome/{word}"], timedelta(seconds=limit_s))
    except RuntimeError:
        raise RunError(
            f"rank {rank} waited {limit_s:.0f} s for rank 0: start every rank, with the same address"
        ) from None
    attempt = store.get(f"welcome/{word}").decode()
    store.set(f"here/{attempt}/{rank}", "")
    return attempt


def _welcome(store: dist.Store, world: int, limit_s: float) -> str:
    attempt = secrets.token_hex(8)
    missing, greeted = set(range(1, world)), set()
    end = time.monotonic() + limit_s
    while missing:
        for rank in sorted(missing):
            # A greeting may be left over from an earlier attempt, so only the answer under the new name counts.
            if store.check([f"here/{attempt}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                word = store.get(f"hello/{rank}").decode()  # perhaps that of an attempt which has ended
                # Old words are answered too: nobody tells them apart, and nobody waits for those.
                if word not in greeted:
                    store.set(f"welcome/{word}", attempt)
                    greeted.add(word)
        if missing and time.monotonic() > end:
            raise RunError(
                f"{name_ranks(missing)} of {world} did not come within {limit_s:.0f} s: is every node started?"
            )
        time.sleep(PAUSE_S)
    return attempt


def name_ranks(ranks: set[int]) -> str:
    """Return `rank 3`, `ranks 3 and 4`, or `ranks 3, 4, 5, 6, 7 and 9 more`."""
    shown = [str(rank) for rank in sorted(ranks)[:SHOWN]]
    if len(ranks) > SHOWN:
        shown.append(f"{len(ranks) - SHOWN} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


BEAT_S = 1.0
SAMPLE_S = 0.02
"""Mean time between looks at whether this rank works or waits."""
READ_AT_ONCE = 256
"""Beats that are read every second. With more ranks, beats are read less often."""
TOLD_S = 5.0
"""Time for the rank that prints the verdict. Then the others end."""
LOST_S = 15.0
"""Time for which a rank that lost a connection waits for a verdict on the rank that is gone."""
GRACE_S = 1.0
"""Time after SIGTERM, when nothing is to be saved, for a verdict that may explain the signal."""
UNHEARD_S = 120.0
"""Limit for the first beat of ranks that have met. The second connection to the store may take half of it."""
LAST_S = 30.0
"""Time for which rank 0 waits at the end for the others to be done."""
FAILED, TERMINATED = 1, 143
GONE = "the launcher's store does not answer: torchrun, or the machine it ran on, is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Position of a rank: its number, its machine and its neighbours."""

    rank: int
    world: int
    neighbours: tuple[int, ...] = ()
    """Ranks that the same launcher started on this machine, this one included."""
    host: str = ""
    """Name of the machine, if there are several."""


class Watchdog:
    """Watchdog of the thread that makes it.

    Args:
        store: Connection to the store for the watchdog's threads.
        main_store: Another connection to the same store, for all other threads.
        watch: Sees the thread.
        say: Prints a line.
        end: Ends the process at once with an exit code.
    """

    def __init__(
        self,
        store: dist.Store,
        main_store: dist.Store,
        home: RankPlace,
        watch: HeartbeatWatch,
        *,
        limits: Limits,
        say: Callable[[str], None],
        end: Callable[[int], None],
    ) -> None:
        self.store, self.main_store, self.home, self.limits = store, main_store, home, limits
        self.say, self.end = say, end
        self.pulse, self.watch = watch.pulse, watch
        self.beat = Beat(host=home.host, machine=namespace_id(), pid=os.getpid())
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
        self._bell_read, self._bell = os.pipe()
        # Two observers, at both ends: one of them survives the loss of any one machine.
        self._observed = _Observed(home.world) if home.rank in (0, home.world - 1) else None
        self._slow = SlowRanks()
        # Looks at equal distances could meet each step at the same points. The run's own generators stay untouched.
        self._random = Random()

    def start(self) -> None:
        """Start the threads. Call this from the main thread, which alone may handle signals."""
        os.set_blocking(self._bell, False)
        # The pipe tells the guard of a signal at once, even while the main thread is inside C code.
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        # The default action would end the process before the guard could look for a verdict.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave_to_guard)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._guard)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching: the work is done, and this rank may be silent and end."""
        self._closed.set()
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _leave_to_guard:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Wake both threads, which may be in the middle of a wait.
        self._due.set()
        os.write(self._bell, b"\0")
        for thread in self._threads:
            thread.join(TOLD_S)
        if self.home.rank == 0 and not self._cut_off:
            self._wait_for_others()
        # A thread that has not stopped may still use these handles.
        if not any(thread.is_alive() for thread in self._threads):
            for handle in (self._bell_read, self._bell, *self._processes):
                os.close(handle)

    def _wait_for_others(self) -> None:
        """Wait on rank 0, which may host the store, until all are done: losing it would look like a failure."""
        keys = [_key(rank) for rank in range(self.home.world)]
        end_s = time.monotonic() + LAST_S
        with suppress(RuntimeError):
            while time.monotonic() < end_s:
                if self.store.check(keys) and all(Beat.decode(text).done for text in self.store.multi_get(keys)):
                    return
                time.sleep(0.02)

    def report_failure(self, sentence: str, code: int) -> None:
        """Report that this rank failed: one rank prints it, all end. Returns only if `end` does."""
        # The talker alone uses the store, so the sentence goes through its queue.
        self._claims.put((Blame(self.home.rank, sentence), code))
        self._wait_for_the_end(sentence, code)

    def report_loss(self, reason: str, trace: TracebackType | None) -> None:
        """Report that a collective failed because another rank is gone. All ranks end, naming the culprit."""
        # The beat is frozen here: what this rank does after its failure says nothing about the cause.
        self._last = replace(self.watch.after(trace), lost=reason)
        self._lost_s = time.monotonic()
        self._wait_for_the_end(self._loss_of_this_rank(self._last).sentence, FAILED)

    def _wait_for_the_end(self, sentence: str, code: int) -> None:
        """Wait for talker or guard to end this process. If they cannot, end it here."""
        self._due.set()
        self._closed.wait(LOST_S + 3 * TOLD_S)
        self.say(sentence)
        self.end(code)

    def _loss_of_this_rank(self, beat: Beat) -> Blame:
        rank = self.home.rank
        return Blame(rank, f"{name_rank(rank, self.beat)} lost the others at {beat.position}: {beat.lost}")

    # the talker

    def _talk(self) -> None:
        try:
            while not self._closed.is_set():
                self._beat_once()
                self._answered_s = time.monotonic()
                self._wait_for_beat()
                self._due.clear()
            self.store.set(_key(self.home.rank), replace(self.beat, done=True).encode())
        except RuntimeError:  # what a store raises: the connection is closed, an answer took too long
            self._cut_off = True
        except Exception as error:  # a bug here: reported, since nobody watches this rank any more
            self.say(f"the watchdog of rank {self.home.rank} failed: {type(error).__name__}: {error}")
            self.end(FAILED)

    def _wait_for_beat(self) -> None:
        """Wait until a beat is due, and see meanwhile how much of the time this rank works."""
        end_s = time.monotonic() + self.beat_s
        # With a GPU the thread that is seen runs ahead of the work.
        while not self.watch.queues and (rest_s := end_s - time.monotonic()) > 0:
            if self._due.wait(min(rest_s, SAMPLE_S * self._random.uniform(0.5, 1.5))):
                return
            self.watch.sample()
        self._due.wait(max(0.0, end_s - time.monotonic()))

    def _beat_once(self) -> None:
        before, seen = self.beat, self._last or self.watch.look()
        self.beat = replace(seen, count=before.count + 1, host=before.host, machine=before.machine, pid=before.pid)
        self.store.set(_key(self.home.rank), self.beat.encode())
        # A verdict of another rank goes before any claim of this one.
        if self.store.check(["verdict"]):
            self._obey(self.store.get("verdict"))
        while not self._claims.empty():
            self._claim(*self._claims.get())
        while not self._dead.empty():
            rank = self._dead.get()
            beat = Beat.decode(self.store.get(_key(rank)))
            # Ranks that have finished their work may end.
            if not beat.done:
                sentence = (
                    f"{name_rank(rank, beat)} died without a message (killed?) in {self.beat.position} of rank "
                    f"{self.home.rank}; its own last beat was at {beat.position}; {ADVICE}"
                )
                self._claim(Blame(rank, sentence), FAILED)
        self._meet_neighbours()
        seen_all = self._observed
        if seen_all is not None and self.beat.count % seen_all.every == 0:
            if blame := seen_all.look(self.store, self.limits):
                self._claim(blame, FAILED)
            if self.home.rank == 0 and seen_all.beats:
                self.pulse.slow_ranks.extend(self._slow.look(seen_all.beats, time.monotonic()))
        if self._last is not None and time.monotonic() > self._lost_s + LOST_S:
            self._claim(self._loss_of_this_rank(self._last), FAILED)

    def _claim(self, verdict: Blame, code: int) -> None:
        """Print the verdict if no other rank has. Otherwise obey that of the other."""
        mine = json.dumps([self.home.rank, verdict.rank, verdict.sentence, code])
        verdict_text = self.store.compare_set("verdict", "", mine)
        if verdict_text.decode() != mine:
            self._obey(verdict_text)
            return
        self._code, self._verdict_s = code, time.monotonic()
        self.say(verdict.sentence)
        self.store.set("told", "")
        self._kill(verdict.rank)
        # This rank ends last: otherwise its launcher would end the others before they exit with the right code.
        limit = self._verdict_s + (GRACE_S if code == FAILED else TOLD_S)
        while self.store.add("ended", 0) < self.home.world - 1 and time.monotonic() < limit:
            time.sleep(0.02)
        self.end(code)

    def _obey(self, verdict_text: bytes) -> None:
        speaker, blamed, _, self._code = json.loads(verdict_text)
        self._verdict_s = time.monotonic()
        # Ending before the verdict is printed could make a launcher end the rank that prints it.
        while not self.store.check(["told"]) and time.monotonic() < self._verdict_s + TOLD_S:
            time.sleep(0.02)
        if blamed != speaker:
            self._kill(blamed)
        self.store.add("ended", 1)
        self.end(self._code)

    def _kill(self, rank: int) -> None:
        """Kill a neighbour: if it hangs it may ignore everything else, and a launcher gives it half a minute."""
        for handle in [handle for handle, neighbour in list(self._processes.items()) if neighbour == rank]:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def _meet_neighbours(self) -> None:
        """Open the processes of the neighbours, once all have sent a beat."""
        others = [rank for rank in self.home.neighbours if rank != self.home.rank]
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
            died_now, terminated = self._wait_for_signals(dead)
            dead |= died_now
            now = time.monotonic()
            # Asked at once: a process that saves now has received the signal and ends by itself, by a handler of its
            # own (training/step/interrupt.py); one that begins later has not.
            saves = signal.getsignal(signal.SIGTERM) is not _leave_to_guard
            terminated_s = terminated_s or now * (terminated and not saves)
            if self._verdict_s:
                if now > self._verdict_s + 2 * TOLD_S:  # the store does not answer, or a pipe is full
                    self.end(self._code)
            elif terminated_s and now > terminated_s + GRACE_S and not self._lost_s:
                self.end(TERMINATED)
            elif self._cut_off or now > self._answered_s + self.limits.silent_s:
                if self.home.rank == min(set(self.home.neighbours) - dead, default=self.home.rank):
                    self.say(f"{GONE}; rank {self.home.rank} was at {self.beat.position}")
                self.end(FAILED)

    def _wait_for_signals(self, dead: set[int]) -> tuple[set[int], bool]:
        """Return (neighbours that have just died, whether SIGTERM came), after a beat at the latest."""
        watched = {handle: rank for handle, rank in list(self._processes.items()) if rank not in dead}
        poll = select.poll()
        for handle in (self._bell_read, *watched):
            poll.register(handle, select.POLLIN)
        ready = [handle for handle, _ in poll.poll(1000 * self.beat_s)]
        died_now = {watched[handle] for handle in ready if handle in watched}
        for rank in died_now:
            self._dead.put(rank)
            self._due.set()
        return died_now, self._bell_read in ready and signal.SIGTERM in os.read(self._bell_read, 64)


class _Observed:
    """All beats, as one rank sees them: for how long each has not changed. 1024 of them take 15 ms to read."""

    def __init__(self, world: int) -> None:
        self.every = 1 + world // READ_AT_ONCE
        self.keys = [_key(rank) for rank in range(world)]
        self.counts = [-1] * world
        self.silent_s = [0.0] * world
        self.beats: Sequence[Beat] = ()
        self.met_s, self.looked_s = time.monotonic(), 0.0

    def look(self, store: dist.Store, limits: Limits) -> Blame | None:
        """Read all beats in one request and judge. Before all ranks are there, only a missing one is blamed."""
        if not self.looked_s and not store.check(self.keys):
            waited_s = time.monotonic() - self.met_s
            if waited_s <= max(UNHEARD_S, limits.silent_s):
                return None
            # No launcher may have been there to see it end.
            missing = next((rank for rank, key in enumerate(self.keys) if not store.check([key])), None)
            sentence = f"rank {missing} joined the others {waited_s:.0f} s ago and has sent nothing since; {ADVICE}"
            return None if missing is None else Blame(missing, sentence)
        self.beats = [Beat.decode(text) for text in store.multi_get(self.keys)]
        self.note([beat.count for beat in self.beats], time.monotonic())
        return judge(self.beats, self.silent_s, limits)

    def note(self, counts: Sequence[int], now_s: float) -> None:
        """Update the silences. If this rank itself was stopped, the pause counts as two looks at most."""
        passed = min(now_s - self.looked_s, 2 * BEAT_S * self.every)
        self.silent_s = [
            s + passed if count == before else 0.0
            for s, count, before in zip(self.silent_s, counts, self.counts, strict=True)
        ]
        self.counts, self.looked_s = list(counts), now_s


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _leave_to_guard(number: int, frame: FrameType | None) -> None:
    """Do nothing on SIGTERM: nothing can be saved. The guard handles it, since the main thread may be stuck."""
