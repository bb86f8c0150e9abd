"""The planner of serving scored on published deployments: time to the first token, per later token, and the order of
configurations. Errors are fractions: 0.05 is 5 %.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

from meshwright.planner.accuracy.choice import spearman
from meshwright.planner.accuracy.published_serving import ACCEPTED, ServingRow, UnknownRow
from meshwright.planner.accuracy.score import quantile
from meshwright.planner.serving.closed_loop import Served, serve
from meshwright.planner.serving.deployment import Deployment
from meshwright.planner.serving.device_kernels import DeviceKernels
from meshwright.planner.serving.disaggregated import serve_apart
from meshwright.planner.serving.serving_memory import serving_memory
from meshwright.planner.serving.step_times import StepTimes

FEWEST = 5
"""Configurations of a group that are ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedServing:
    """A row and what the planner says of it."""

    row: ServingRow
    planned: Served

    @property
    def first_token_error(self) -> float:
        """Planned over measured, minus 1."""
        return self.planned.first_token_s / self.row.first_token_s - 1

    @property
    def per_token_error(self) -> float:
        """The same of later tokens."""
        return self.planned.per_token_s / self.row.per_token_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingScore:
    """Of some rows; None where there is nothing to score."""

    rows: int
    """Those that cannot be planned included."""
    planned: int
    per_token_median: float | None
    per_token_p90: float | None
    first_token_median: float | None
    first_token_p90: float | None
    rank: float | None
    """Spearman's, of times per token of the configurations of one model and system: median of the groups."""
    throughput_rank: float | None
    """The same of tokens per second and GPU."""
    groups: int


class ServingJudge:
    """Plans rows; equal ones once."""

    def __init__(self) -> None:
        self._kernels: dict[str, DeviceKernels] = {}
        self._times: dict[Deployment, StepTimes] = {}
        self._known: dict[tuple[object, ...], Served] = {}

    def judge(self, rows: Iterable[ServingRow | UnknownRow]) -> list[JudgedServing | UnknownRow]:
        """Every row, in order."""
        return [
            one if isinstance(one, UnknownRow) else JudgedServing(row=one, planned=self.planned(one)) for one in rows
        ]

    def planned(self, row: ServingRow) -> Served:
        """Of one row."""
        key = (row.decode, row.prefill, row.load, row.workers)
        if key not in self._known:
            self._known[key] = self._planned(row)
        return self._known[key]

    def _planned(self, row: ServingRow) -> Served:
        times, accepted = self._of(row.decode), ACCEPTED[row.decode.drafted]
        if row.prefill:
            return serve_apart(self._of(row.prefill), times, row.load, row.workers, accepted)
        length = row.load.input_tokens + row.load.output_tokens
        memory = serving_memory(row.decode, length)
        return serve(times, row.load, max(1.0, memory.most_sequences) * length, accepted)

    def _of(self, of: Deployment) -> StepTimes:
        if of not in self._times:
            name = f"{of.device.name} {of.per_node}"
            kernels = self._kernels.setdefault(name, DeviceKernels(of.device, of.per_node))
            self._times[of] = StepTimes(of, kernels)
        return self._times[of]


def held_out(row: ServingRow | UnknownRow) -> bool:
    """Half of the rows, by a hash of all that is asked and nothing that was measured: constants were chosen by looking
    at the other half."""
    words = "|".join(value for name, value in row.columns.items() if not name.startswith("silicon"))
    return bool(sha256(words.encode()).digest()[0] % 2)


def score_serving(judged: Sequence[JudgedServing | UnknownRow]) -> ServingScore:
    """Of all these rows together."""
    known = [one for one in judged if isinstance(one, JudgedServing)]
    ranks = _ranks(known, lambda row, served: served.per_token_s)
    throughputs = _ranks(known, _throughput)
    return ServingScore(
        rows=len(judged), planned=len(known),
        per_token_median=quantile([abs(one.per_token_error) for one in known], 0.5),
        per_token_p90=quantile([abs(one.per_token_error) for one in known], 0.9),
        first_token_median=quantile([abs(one.first_token_error) for one in known], 0.5),
        first_token_p90=quantile([abs(one.first_token_error) for one in known], 0.9),
        rank=median(ranks) if ranks else None,
        throughput_rank=median(throughputs) if throughputs else None,
        groups=len(ranks),
    )  # fmt: skip


Figure = Callable[[ServingRow, Served], float]


def _ranks(known: Sequence[JudgedServing], figure: Figure) -> list[float]:
    """Of each group with enough configurations."""
    groups: dict[tuple[str, str], list[JudgedServing]] = {}
    for one in known:
        _, system, model = one.row.family
        groups.setdefault((system, model), []).append(one)
    found = []
    for own in groups.values():
        if len(own) >= FEWEST:
            planned = [figure(one.row, one.planned) for one in own]
            found.append(spearman(planned, [figure(one.row, _measured(one.row)) for one in own]))
    return found


def _measured(row: ServingRow) -> Served:
    request_s = row.first_token_s + row.per_token_s * row.load.output_tokens
    rate = row.load.concurrency * row.load.output_tokens / request_s
    return Served(
        first_token_s=row.first_token_s, per_token_s=row.per_token_s, request_s=request_s, output_tokens_per_s=rate
    )


def _throughput(row: ServingRow, served: Served) -> float:
    """Tokens per second and GPU, from both times."""
    request_s = served.first_token_s + served.per_token_s * row.load.output_tokens
    gpus = row.workers[1] * row.decode.degrees.gpus
    gpus += row.workers[0] * row.prefill.degrees.gpus if row.prefill else 0
    groups = row.workers[1] * row.decode.degrees.attention_dp
    return groups * row.load.concurrency * row.load.output_tokens / request_s / gpus
