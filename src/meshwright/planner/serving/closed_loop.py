"""Simulation of a benchmark with so many requests in flight, on one engine.

The load is a closed loop, as in vLLM's benchmark_serving and its descendants: `concurrency` requests are sent at once,
and each one that ends is followed by the next. Steps in which nothing begins or ends are taken together.

The scheduler's rules decide each step.
"""

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from meshwright.planner.serving.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of an engine."""

    input_tokens: int
    output_tokens: int
    concurrency: float
    """Requests in flight, of one attention rank."""
    spread: float = 0.0
    """Lengths are spread evenly between 1 - spread and 1 of those above."""
    waves: int = 10
    """Requests for each of those in flight."""

    def lengths(self, number: int) -> tuple[float, float]:
        """Return the tokens of prompt and answer of one request: evenly spread, without chance."""
        # Fractions of multiples of irrational numbers fill an interval evenly, however many are taken.
        first, second = (number * 0.6180339887) % 1.0, (number * 0.7548776662 + 0.5) % 1.0
        answer = max(2.0, self.output_tokens * (1 - self.spread * second))
        return self.input_tokens * (1 - self.spread * first), answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Outcome in seconds: means over requests."""

    first_token_s: float
    per_token_s: float
    """Time of the tokens after the first."""
    request_s: float
    output_tokens_per_s: float
    """Rate of one attention rank."""


@dataclass(slots=True)
class _Request:
    prompt: float
    output: float
    sent_s: float
    read: float = 0.0
    first_s: float = 0.0


MOST_REQUESTS = 1500


def serve(times: StepTimes, load: Load, room: float = float("inf"), accepted: float = 1.0) -> Served:
    """Simulate a load. `room`: positions that a rank's cache holds. `accepted`: tokens of a sequence in a step."""
    return _Loop(times, load, room, accepted).play()


class _Loop:
    def __init__(self, times: StepTimes, load: Load, room: float, accepted: float) -> None:
        self.times, self.load, self.room, self.accepted = times, load, room, accepted
        self.rules = times.deployment.framework
        self.now = 0.0
        self.planned = 0.0
        """Time at which the running step was planned. Later requests wait for the next one."""
        self.steps = 1e9
        """Steps of decoding since new requests were looked for."""
        self.tick = 0.0
        self.held = 0.0
        self.positions = 0.0
        self.waiting: list[_Request] = []
        self.running: list[tuple[float, int, _Request]] = []
        places = max(1, round(load.concurrency))
        self.places = places
        self.total = max(3 * places, min(load.waves * places, MOST_REQUESTS))
        self.sent = 0
        self.done: list[tuple[float, float, float, float, float]] = []
        """(time sent, to the first token, per later token, in all, tokens) of each request."""
        for _ in range(places):
            self._send()

    def _send(self) -> None:
        if self.sent >= self.total:
            return
        load, number = self.load, self.sent
        prompt, output = load.lengths(number)
        self.waiting.append(_Request(prompt, output, self.now))
        self.sent += 1

    def play(self) -> Served:
        while self.waiting or self.running:
            started = self.now
            if not self._run_prompt_step():
                self._decode()
            # An engine that plans ahead saw only requests sent before the running step began.
            self.planned = started if self.rules.ahead else self.now
        # The first wave meets an empty engine, so it counts with its share of all waves only.
        first = sorted(self.done)[: self.places]
        later = sorted(self.done)[self.places :] or first
        share = 1 / self.load.waves

        def mean(column: int) -> float:
            at_first, then = (sum(row[column] for row in rows) / len(rows) for rows in (first, later))
            return share * at_first + (1 - share) * then

        return Served(
            first_token_s=mean(1), per_token_s=mean(2), request_s=mean(3),
            output_tokens_per_s=sum(row[4] for row in self.done) / self.now,
        )  # fmt: skip

    def _run_prompt_step(self) -> bool:
        """Run a step with prompts, if one waits and there is room for it. Return whether there was such a step."""
        if self.running and self.steps < self.rules.receive_every:
            return False
        self.steps = 0.0
        batch = float(len(self.running))
        mixed = batch if self.rules.mixes else 0.0
        chunks = self._admit(self.rules.budget - mixed)
        if not chunks:
            return False
        context = self.positions / batch if batch else 0.0
        self.steps = 1e9
        self.now += self.times.prefill_s([(take, request.read) for request, take in chunks], mixed, context)
        if self.rules.mixes and self.running:
            self._advance(1.0)
        for request, take in chunks:
            request.read += take
            if request.read >= request.prompt:
                self.waiting.remove(request)
                request.first_s = self.now
                self.positions += request.prompt
                heappush(self.running, (self.tick + (request.output - 1) / self.accepted, id(request), request))
        self._end()
        return True

    def _admit(self, budget: float) -> list[tuple[_Request, float]]:
        """Return requests in the order of their arrival with the tokens that a step reads of each, within `budget`."""
        if self.running and self.rules.mixed_prompt_tokens:
            budget = min(budget, self.rules.mixed_prompt_tokens)
        chunks: list[tuple[_Request, float]] = []
        most = self.rules.sequences or math.inf
        for request in self.waiting:
            is_new, needed = request.read == 0, request.prompt + request.output
            # The first wave is there at the start, and nobody waits for an empty engine.
            came_too_late = request.sent_s and request.sent_s + self.rules.turn_us / 1e6 > max(self.planned, 0.0)
            batch_is_full = is_new and len(self.running) + len(chunks) >= most
            cache_is_full = is_new and self.held and self.held + needed > self.room
            take = min(request.prompt - request.read, budget)
            if (came_too_late and self.running) or batch_is_full or cache_is_full or take <= 0:
                break
            self.held += needed if is_new else 0.0
            chunks.append((request, take))
            budget -= take
        return chunks

    def _decode(self) -> None:
        batch = float(len(self.running))
        ticks = 1.0 if self.waiting else max(1.0, self.running[0][0] - self.tick)
        context = self.positions / batch + ticks * self.accepted / 2
        self.now += ticks * self.times.decode_s(batch, context)
        self.steps += ticks
        self._advance(ticks)
        self._end()

    def _advance(self, ticks: float) -> None:
        self.tick += ticks
        self.positions += ticks * self.accepted * len(self.running)

    def _end(self) -> None:
        while self.running and self.running[0][0] <= self.tick + 1e-9:
            _, _, request = heappop(self.running)
            self.held -= request.prompt + request.output
            self.positions -= request.prompt + request.output
            each = (self.now - request.first_s) / (request.output - 1)
            first = request.first_s - request.sent_s + self.rules.prefill_us / 1e6
            self.done.append((request.sent_s, first, each, self.now - request.sent_s, request.output))
            self._send()
        if not self.running:
            self.positions = 0.0
