"""A record of an engine's steps in JSON lines: what waits and runs, who holds which block, what moved and ended.

The first line is a header with the format and the sizes. Then come requests when they are added, and steps when they
are read. A line holds numbers and no text, so a record tells nothing of what was asked or answered.

A sequence is its number in the scheduler: a request has as many numbers in a row as it has answers or beams. Tables are
those while the step computes, and only their changes are written. No torch.
"""

import json
import weakref
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO, final

from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.scheduler import Scheduler, StepPlan
from meshwright.spec.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from meshwright.serving.engine.served_request import ServedAnswer, ServedRequest

FORMAT, VERSION = "meshwright-serving-record", 1
MOST_BYTES = 64 * 2**20
"""Size at which a record ends; the engine goes on."""
FLUSH_S = 1.0
"""Longest time for which lines of a busy engine stay in memory."""


@final
class ServingRecorder:
    """Writer of one record. Its scheduler is only read."""

    def __init__(self, path: Path, scheduler: Scheduler, sizes: Mapping[str, Any], room: int = MOST_BYTES) -> None:
        """Begin a file. Raises ArgumentError if it exists or cannot be written. `sizes`: fields of the header."""
        try:
            self._file: TextIO | None = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ArgumentError("record", path, "is there already", "name another file") from None
        except OSError as error:
            raise ArgumentError("record", path, "cannot be written", f"{error.strerror}") from None
        weakref.finalize(self, self._file.close)  # an engine has no end but that of its last user
        self._scheduler, self._room, self._began = scheduler, room, monotonic()
        self._flushed, self._steps, self._preemptions = 0.0, 0, scheduler.preemptions
        self._tables: dict[int, list[int]] = {}
        self._preempted: dict[int, int] = {}
        self._made: dict[ServedAnswer, tuple[int, int]] = {}  # sequence number, and tokens that were written
        self._sets: dict[str, tuple[object, set[int]]] = {}
        self._line: dict[str, Any] = {}
        tables = scheduler.tables
        self._hits = tables.hits, tables.host_hits
        self._write({
            "format": FORMAT, "version": VERSION, "block": tables.block, "blocks": tables.pool.size,
            "host_slots": 0 if tables.pool.host is None else tables.pool.host.size, "window": tables.window,
            "most_tokens": scheduler.most_tokens, "prompt_tokens": scheduler.prompt_tokens,
            "most_sequences": scheduler.most_sequences, **sizes,
        })  # fmt: skip

    def note_request(self, sequence: CachedSequence, request: "ServedRequest") -> None:
        """Write a request that was added."""
        for offset, answer in enumerate(request.answers):
            self._made[answer] = sequence.number + offset, 0
        options = request.options
        self._write({
            "request": sequence.number, "sequences": sequence.copies, "prompt": len(request.prompt),
            "limit": sequence.limit, "priority": options.priority, "beams": options.beams, "n": options.n,
            "step": self._steps, "seconds": self._seconds(),
        })  # fmt: skip

    def note_blocks(self, plan: StepPlan) -> None:
        """Note who holds what while a step computes."""
        scheduler, pool, numbers = self._scheduler, self._scheduler.tables.pool, set[int]()
        tables, running = dict[int, list[int]](), list[tuple[int, int, int]]()
        for sequence in scheduler.running:
            number, table = sequence.number, sequence.table
            numbers.add(number)
            running.append((number, sequence.computed, plan.chunks.get(sequence, 0)))
            before = self._tables.get(number, [])
            if table != before:
                # A table mostly grows at its end. What changes inside it is written from its beginning.
                same = len(before) if table[: len(before)] == before else 0
                tables[number] = [same, *table[same:]]
                self._tables[number] = table.copy()
        for number in self._tables.keys() - numbers:
            del self._tables[number]
        line: dict[str, Any] = {
            "waiting": [sequence.number for sequence in sorted(scheduler.queue, key=lambda each: each.rank)],
            "running": running,
        }
        line |= {"tables": tables, "moves": [list(move) for move in plan.moves], "preempted": self._newly_preempted()}
        hits = scheduler.tables.hits, scheduler.tables.host_hits
        line |= {"hits": hits[0] - self._hits[0], "host_hits": hits[1] - self._hits[1]}
        self._hits = hits
        published = pool.published
        line["cached"] = self._changes("cached", published, (len(published), pool.evicted, scheduler.preemptions))
        if pool.host is not None:
            line["host"] = self._changes("host", pool.host.slots[: len(pool.host)], object())
        self._line = line

    def note_tokens(self) -> None:
        """Write the line of the step, once its tokens are read."""
        made, ended = dict[int, int](), dict[int, str]()
        for answer, (number, before) in list(self._made.items()):
            if len(answer.ids) > before:
                made[number] = len(answer.ids) - before
                self._made[answer] = number, len(answer.ids)
            if answer.ending:
                ended[number] = answer.ending
                del self._made[answer]
        line = self._line | {"made": made, "ended": ended}
        self._write(
            {"step": self._steps, "seconds": self._seconds()} | {key: part for key, part in line.items() if part}
        )
        self._steps += 1

    def _newly_preempted(self) -> list[int]:
        """Return sequences that were preempted for this step."""
        scheduler = self._scheduler
        if scheduler.preemptions == self._preemptions:
            return []
        self._preemptions = scheduler.preemptions
        counts = {each.number: each.preemptions for each in (*scheduler.queue, *scheduler.running) if each.preemptions}
        before, self._preempted = self._preempted, counts
        return [number for number, count in counts.items() if count > before.get(number, 0)]

    def _changes(self, name: str, members: Collection[int], version: object) -> list[list[int]]:
        """Return members that came and that went, or nothing if neither. An equal version means equal members."""
        seen, before = self._sets.get(name, (None, set()))
        if seen == version:
            return []
        now = set(members)
        self._sets[name] = version, now
        return [sorted(now - before), sorted(before - now)] if now != before else []

    def _seconds(self) -> float:
        return round(monotonic() - self._began, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Write a line, unless the record is full or its disk fails: an engine never ends for its record."""
        if self._file is None:
            return
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._room -= len(text)
        try:
            if self._room < 0:
                self._file.write('{"cut":true}\n')
                self.close()
                return
            self._file.write(text)
            if self._scheduler.idle or monotonic() - self._flushed > FLUSH_S:
                self._file.flush()
                self._flushed = monotonic()
        except OSError:
            self._file = None

    def close(self) -> None:
        """End the file. What follows is not recorded."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True)
class ServingRecord:
    """A record as it was read."""

    header: dict[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False
    """True when the engine went on after the record was full."""


def is_record(path: Path) -> bool:
    """Return whether a file begins with the header of a record, of any version."""
    try:
        with path.open("rb") as file:
            return file.read(len(FORMAT) + 12).startswith(f'{{"format":"{FORMAT}"'.encode())
    except OSError:
        return False


def read_record(path: Path) -> ServingRecord:
    """Read a record, also that of a server that was killed while it wrote its last line. Raises DataError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is not UTF-8"
        raise DataError(f"{path} cannot be read as a record of serving: {why}") from None
    record = None
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was not written whole
        try:
            entry = json.loads(line)
            if record is None:
                if entry["format"] != FORMAT or entry["version"] != VERSION:
                    raise ValueError(f"it has format {entry['format']} {entry['version']}, not {FORMAT} {VERSION}")
                record = ServingRecord(entry)
            elif "request" in entry:
                record.requests.append(entry)
            elif "running" in entry or "step" in entry:
                record.steps.append({"running": [], "tables": {}, **entry})
            else:
                record.cut = bool(entry["cut"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}, is not of a record that serve --record writes: {error}") from None
    if record is None or not record.steps:
        raise DataError(f"{path} holds no step: record again, and send a request")
    return record


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Shares of reserved positions that hold tokens, over all steps: in blocks, and as if memory were contiguous.

    Contiguous memory is reserved for a sequence from its first step to its last: for the longest one that the engine
    takes, for the next power of two above its final length, or for that length, which only an oracle knows. These are
    Orca (Max), (Pow2) and (Oracle) of Kwon et al. 2023, arXiv:2309.06180, section 2, without memory between sequences.
    """

    blocks: float
    longest: float
    power_of_two: float
    final: float
    holders: float
    """Tokens of all sequences over tokens in memory: above 1 where sequences share blocks."""


def memory_use(record: ServingRecord) -> MemoryUse:
    """Compute what memory was used for. Raises DataError for a record whose lines contradict each other."""
    size, longest = record.header["block"], record.header["longest"]
    ends = dict[int, int]()
    for step in record.steps:
        ends.update((number, computed) for number, computed, _ in step["running"])
    reserved, tables = defaultdict[str, int](int), dict[int, list[int]]()
    try:
        for step in record.steps:
            for number, (same, *blocks) in step["tables"].items():
                tables[int(number)] = [*tables.get(int(number), [])[:same], *blocks]
            held, partial = set[int](), dict[int, int]()
            for number, computed, _ in step["running"]:
                table = tables[number]
                held.update(table)
                # A block that several sequences hold counts once, as full as its fullest holder sees it.
                for index in range(computed // size, len(table)):
                    filled = max(0, computed - index * size)
                    partial[table[index]] = max(partial.get(table[index], 0), filled)
                gone = sum(block < 0 for block in table) * size
                reserved["tokens"] += computed - gone
                reserved["longest"] += longest
                reserved["power_of_two"] += 1 << (ends[number] - 1).bit_length()
                reserved["final"] += ends[number]
                reserved["contiguous"] += computed
            held = {block for block in held if block >= 0}
            reserved["blocks"] += len(held) * size
            reserved["in_blocks"] += len(held) * size - sum(size - filled for filled in partial.values())
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"step {step.get('step')} of the record is damaged: {type(error).__name__} {error}") from None
    contiguous = {
        name: reserved["contiguous"] / max(1, reserved[name]) for name in ("longest", "power_of_two", "final")
    }
    return MemoryUse(
        blocks=reserved["in_blocks"] / max(1, reserved["blocks"]), **contiguous,
        holders=reserved["tokens"] / max(1, reserved["in_blocks"]),
    )  # fmt: skip
