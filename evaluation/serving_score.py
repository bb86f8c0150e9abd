"""Score of the serving planner on published deployments: time to the first token, per later token, and ranks.

Errors are fractions: 0.05 is 5 %.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

from evaluation.published_serving import ACCEPTED, ServingRow, UnknownRow
from evaluation.separate_engines import serve_apart
from meshwright.planner.accuracy.score import quantile, spearman
from meshwright.planner.serving.closed_loop import Served, serve
from meshwright.planner.serving.deployment import Deployment
from meshwright.planner.serving.device_kernels import DeviceKernels
from meshwright.planner.serving.serving_memory import serving_memory
from meshwright.planner.serving.step_times import StepTimes

FEWEST = 5
"""Least number of configurations of a group that are ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedServing:
    """A measured deployment and the planner's prediction for it."""

    row: ServingRow
    planned: Served

    @property
    def first_token_error(self) -> float:
        """Planned over measured time to the first token, minus 1."""
        return self.planned.first_token_s / self.row.first_token_s - 1

    @property
    def per_token_error(self) -> float:
        """Planned over measured time per later token, minus 1."""
        return self.planned.per_token_s / self.row.per_token_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingScore:
    """Score of some rows. None = nothing to score."""

    rows: int
    """All rows, including those that cannot be planned."""
    planned: int
    per_token_median: float | None
    per_token_p90: float | None
    first_token_median: float | None
    first_token_p90: float | None
    rank: float | None
    """Spearman's, of times per token of the configurations of one model and system: median of the groups."""
    throughput_rank: float | None
    """Spearman's, of tokens per second and GPU."""
    groups: int


class ServingJudge:
    """Planner of rows, each distinct one once."""

    def __init__(self) -> None:
        self._kernels: dict[str, DeviceKernels] = {}
        self._times: dict[Deployment, StepTimes] = {}
        self._known: dict[tuple[object, ...], Served] = {}

    def judge(self, rows: Iterable[ServingRow | UnknownRow]) -> list[JudgedServing | UnknownRow]:
        """Judge every row, in order."""
        return [
            row if isinstance(row, UnknownRow) else JudgedServing(row=row, planned=self.planned(row)) for row in rows
        ]

    def planned(self, row: ServingRow) -> Served:
        """Plan one row."""
        key = (row.decode, row.prefill, row.load, row.workers)
        if key not in self._known:
            self._known[key] = self._planned(row)
        return self._known[key]

    def _planned(self, row: ServingRow) -> Served:
        times, accepted = self._step_times(row.decode), ACCEPTED[row.decode.drafted]
        if row.prefill:
            return serve_apart(self._step_times(row.prefill), times, row.load, row.workers, accepted)
        length = row.load.input_tokens + row.load.output_tokens
        memory = serving_memory(row.decode, length)
        return serve(times, row.load, max(1.0, memory.most_sequences) * length, accepted)

    def _step_times(self, deployment: Deployment) -> StepTimes:
        if deployment not in self._times:
            name = f"{deployment.device.name} {deployment.per_node}"
            kernels = self._kernels.setdefault(name, DeviceKernels(deployment.device, deployment.per_node))
            self._times[deployment] = StepTimes(deployment, kernels)
        return self._times[deployment]


def held_out(row: ServingRow | UnknownRow) -> bool:
    """Return whether no constant was chosen on a row. A hash of its inputs, not its figures, decides."""
    words = "|".join(value for name, value in row.columns.items() if not name.startswith("silicon"))
    return bool(sha256(words.encode()).digest()[0] % 2)


def score_serving(judged: Sequence[JudgedServing | UnknownRow]) -> ServingScore:
    """Score all these rows together."""
    known = [entry for entry in judged if isinstance(entry, JudgedServing)]
    ranks = _ranks(known, lambda row, served: served.per_token_s)
    throughputs = _ranks(known, _throughput)
    return ServingScore(
        rows=len(judged), planned=len(known),
        per_token_median=quantile([abs(entry.per_token_error) for entry in known], 0.5),
        per_token_p90=quantile([abs(entry.per_token_error) for entry in known], 0.9),
        first_token_median=quantile([abs(entry.first_token_error) for entry in known], 0.5),
        first_token_p90=quantile([abs(entry.first_token_error) for entry in known], 0.9),
        rank=median(ranks) if ranks else None,
        throughput_rank=median(throughputs) if throughputs else None,
        groups=len(ranks),
    )  # fmt: skip


Figure = Callable[[ServingRow, Served], float]


def _ranks(known: Sequence[JudgedServing], figure: Figure) -> list[float]:
    """Return the rank correlation of each group with enough configurations."""
    groups: dict[tuple[str, str], list[JudgedServing]] = {}
    for entry in known:
        _, system, model = entry.row.family
        groups.setdefault((system, model), []).append(entry)
    ranks = []
    for group in groups.values():
        if len(group) >= FEWEST:
            planned = [figure(entry.row, entry.planned) for entry in group]
            ranks.append(spearman(planned, [figure(entry.row, _measured(entry.row)) for entry in group]))
    return ranks


def _measured(row: ServingRow) -> Served:
    request_s = row.first_token_s + row.per_token_s * row.load.output_tokens
    rate = row.load.concurrency * row.load.output_tokens / request_s
    return Served(
        first_token_s=row.first_token_s, per_token_s=row.per_token_s, request_s=request_s, output_tokens_per_s=rate
    )


def _throughput(row: ServingRow, served: Served) -> float:
    """Return the tokens per second and GPU, from both times."""
    request_s = served.first_token_s + served.per_token_s * row.load.output_tokens
    gpus = row.workers[1] * row.decode.degrees.gpus
    gpus += row.workers[0] * row.prefill.degrees.gpus if row.prefill else 0
    groups = row.workers[1] * row.decode.degrees.attention_dp
    return groups * row.load.concurrency * row.load.output_tokens / request_s / gpus
