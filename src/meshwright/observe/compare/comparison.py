"""Columns (planned | dry run | measured) and rows of a comparison: memory, traffic, parts of the step, and use.

A column is a shared document, or the reason for its absence.

A row is judged by the distance of the others from the measured figure, or from the dry run if nothing was measured.
Traffic must agree exactly, except for bytes that a router sends to experts. A small part is judged against a quarter of
its whole: an error in it counts as much as one there. Memory is judged against LEAST_MEMORY_BYTES at least. Peaks are
compared wherever they occur, but their parts only between columns whose peaks occur at similar moments. Unknown figures
are None, with the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.observe.compare.finished_run import DRYRUN, PROFILE, FinishedRun, same_program, training_document
from meshwright.observe.shared_document import KindBytes, RankRecord, SentEntry, SharedDocument, parse_document
from meshwright.planner import explain
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan, presets
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.memory.held import KINDS, PLANNED, STATES
from meshwright.spec.units import many

DryRunner = Callable[[Plan, str], SharedDocument]
"""(plan, device) -> its dry run, if the run folder has none."""
SMALL = 0.25
"""Share of the whole below which a part is judged as if it had this share."""
LEAST_MEMORY_BYTES = 20 * 2**20
"""Memory below this is judged as if it were this much: toy runs of two ranks differ by 1.5 MiB of logits."""
TIMES = ("compute", "exchange", "bubble", "weights", "gradients", "optimizer", "other")
USES = {
    "tokens_per_second_per_device": "tokens/s per device", "mfu_causal": "MFU (causal)", "mfu_full": "MFU (full)",
    "hfu": "HFU (causal)", "bubble_fraction": "bubble",
}  # fmt: skip
UNITS = {"tokens_per_second_per_device": "tokens/s"}
STATES_ONLY = "training counts what it keeps from step to step: meshwright profile measures the rest"
RESIDENT = "resident memory of a process is no peak of its tensors: meshwright profile measures it"
AT_UPDATE = "at the optimizer's update"
ROUTED = ("ep", "all_to_all")
"""Traffic whose bytes a router decides."""
IN_TRAINING = ", in training"
PASSING = ("gradients", "activations", "logits", "buffers", "temporaries", "tokens")
"""Kinds that come and go in a step."""
COPIES = ("parameters", "shards")
"""Kinds that also come and go if a rank holds whole copies and its shards until the update (ZeRO-1, ZeRO-2)."""
UNCOUNTED = "the planner does not count it"
Values = tuple[float | None, float | None, float | None]
Reasons = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of planned, dry run, measured."""

    title: str
    document: SharedDocument | None
    about: str
    """Description of the document, or the reason for its absence."""
    timeless: str = ""
    """Reason why it has no times."""
    elsewhere: str = ""
    """Explanation if it is for another device than the run's. Empty = it is not."""
    trained: SharedDocument | None = None
    """Measurements of training itself, where there is a profile."""

    def rank(self, rank: int) -> RankRecord | None:
        """Return the record of a rank."""
        return next((record for record in self.document.ranks if record.rank == rank), None) if self.document else None


def columns(
    run: FinishedRun, planner: Estimator | None = None, dryer: DryRunner | None = None
) -> tuple[Column, Column, Column]:
    """Return planned, dry run, measured. `planner` knows this machine; without one data sheets are used."""
    plan = run.plan_as_run
    # Times of a GPU's data sheet would be compared with a CPU, so only memory and traffic are planned there.
    on_cpu = planner is None and run.device == "cpu" and plan.cluster.device.is_gpu
    first = _program_column(plan) if on_cpu else planned_column(plan, planner)
    return first, dry_run_column(run, plan, dryer), measured_column(run, plan)


def planned_column(plan: Plan, planner: Estimator | None = None) -> Column:
    """Return the planner's prediction for every pipeline stage, with times only if the device is known."""
    cluster = planner.cluster if planner else plan.cluster
    is_described, device = planner is not None or cluster.device.half_flop_per_s > 0, cluster.device.name
    prediction = (planner or build_estimator(plan)).predict(plan)
    document = replace(parse_document(explain.document(prediction), "the prediction"), ranks=_stage_records(prediction))
    if not is_described:
        document = replace(
            document, time=(), step_seconds=None, tokens_per_second_per_device=None, mfu_causal=None, mfu_full=None,
            hfu=None, bubble_fraction=None,
        )  # fmt: skip
    return Column(
        title="planned",
        document=document,
        about=f"the planner's formulas, for {device}",
        timeless="" if is_described else f"the plan's device, {device}, is not described: name a cluster",
    )


def _program_column(plan: Plan) -> Column:
    """Return the prediction for a GPU's plan that ran on a CPU: memory and traffic of its program there."""
    device = plan.cluster.device.name
    plan_on_cpu = replace(plan, cluster=replace(plan.cluster, device=presets.device("local")))
    return replace(
        planned_column(plan_on_cpu),
        about="the planner's formulas, for this program on a CPU",
        timeless=f"the plan is for {device}, and the run was on a CPU",
        elsewhere=f"The plan is for {device}, and the run was on a CPU: memory and traffic of the program are "
        "compared, and no time. A cluster file of this machine, made by meshwright calibrate, has times too.",
    )


def _stage_records(prediction: Prediction) -> tuple[RankRecord, ...]:
    ranks = pipeline_ranks(prediction.plan.layout)
    return tuple(
        RankRecord(
            rank=rank,
            # The reserve belongs to libraries, which neither a dry run nor an allocator's peak of tensors sees.
            peak_bytes=round(memory.total_bytes - memory.kinds["reserve"]),
            when=memory.when,
            memory=tuple(KindBytes(kind=kind, bytes=round(size)) for kind, size in memory.kinds.items() if size),
            traffic=tuple(
                SentEntry(axis=sent.axis, collective=sent.collective, bytes=sent.sent_bytes, calls=sent.calls)
                for sent in prediction.traffic(stage)
            ),
        )
        for stage, (rank, memory) in enumerate(zip(ranks, prediction.memory, strict=True))
    )


def dry_run_column(run: FinishedRun, plan: Plan, dryer: DryRunner | None = None) -> Column:
    """Return the dry run in the folder, or a new one."""
    stored = run.dryrun
    timeless = "a dry run moves no numbers, so it takes no time"
    ours = stored is not None and same_program(plan, stored) and run.device in ("", stored.device)
    # A dry run of single ranks (--rank) lacks stages, so it is made again where that is possible.
    has_all_stages = stored is not None and {record.rank for record in stored.ranks}.issuperset(
        pipeline_ranks(plan.layout)
    )
    if stored is not None and ours and (has_all_stages or dryer is None):
        about = f"the real program on fake tensors, as on a {stored.device} device ({DRYRUN})"
        return Column(title="dry run", document=stored, about=about, timeless=timeless)
    if dryer is None:
        reason = (
            f"its {DRYRUN} is of another plan, device or version" if stored else f"there is no {DRYRUN} in the folder"
        )
        return Column(title="dry run", document=None, about=f"{reason}: meshwright compare makes it", timeless=timeless)
    document = dryer(plan, run.device)
    about = f"the real program on fake tensors, as on a {document.device} device"
    return Column(title="dry run", document=document, about=about, timeless=timeless)


def measured_column(run: FinishedRun, plan: Plan) -> Column:
    """Return the profile in the folder, completed by the measurements of training."""
    trained_document, profile = training_document(run), run.profile
    trained = f"{many(len(run.steps), 'step')} of training"
    if profile is None or not same_program(plan, profile):
        other = f"; {PROFILE} is of another plan and not used" if profile else ""
        if trained_document is None:
            return Column(title="measured", document=None, about=f"nothing was trained here{other}")
        what = "" if run.ledger else ", which left no ledger.json"
        timeless = "training keeps no parts of its time: meshwright profile measures them"
        return Column(title="measured", document=trained_document, about=f"{trained}{what}{other}", timeless=timeless)
    profiled = "; ".join((f"a profile of the plan ({PROFILE})", *profile.notes))
    if trained_document is None:
        return Column(title="measured", document=profile, about=profiled)
    # The profile comes last and so wins: training itself measures only what it keeps from step to step.
    ranks = {record.rank: record for record in (*trained_document.ranks, *profile.ranks)}
    for record in trained_document.ranks:
        if ranks[record.rank].traffic is None:
            ranks[record.rank] = replace(ranks[record.rank], traffic=record.traffic)
    document = replace(
        profile, ranks=tuple(ranks[rank] for rank in sorted(ranks)), time=(*profile.time, *trained_document.time)
    )
    speed = f", which took {trained_document.step_seconds:.3g} s each" if trained_document.step_seconds else ""
    return Column(title="measured", document=document, about=f"{profiled}; {trained}{speed}", trained=trained_document)


Columns = tuple[Column, Column, Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One figure in three columns."""

    section: str
    """Section: memory, traffic, time or use."""
    what: str
    unit: str
    """Unit: bytes, calls, seconds, tokens/s or share."""
    rank: int | None = None
    values: Values
    """Figures: planned, dry run, measured."""
    tolerance: float | None = None
    """Relative tolerance. None = shown but not judged: known only once, or implied by other rows."""
    whole: float = 0.0
    """Whole of which the figure is a part; small parts are judged against a share of it."""
    missing: Reasons = ("", "", "")
    aside: tuple[int, ...] = ()
    """Columns of another moment than the rest: shown but not judged."""
    note: str = ""
    """Description of those moments."""

    @property
    def reference(self) -> int | None:
        """The column against which the others are judged."""
        return next((column for column in (2, 1) if self._judged(column)), None)

    def _judged(self, column: int) -> bool:
        return self.values[column] is not None and column not in self.aside

    def error(self, column: int) -> float | None:
        """Return (figure - reference) / reference of a column. None = nothing to compare."""
        figure, at = self.values[column], self.reference
        if figure is None or at is None or at <= column or column in self.aside:
            return None
        base = self.values[at] or 0.0
        if figure == base:
            return 0.0
        return (figure - base) / base if base else float("inf")

    @property
    def beyond(self) -> tuple[int, ...]:
        """The columns that are too far from the reference."""
        at = self.reference
        if self.tolerance is None or at is None:
            return ()
        # A toy run differs by megabytes and a slight part by microseconds: neither is judged by its own size.
        base = self.values[at] or 0.0
        room = self.tolerance * max(abs(base), self._least)
        return tuple(
            n
            for n, value in enumerate(self.values[:at])
            if value is not None and self._judged(n) and abs(value - base) > room
        )

    @property
    def _least(self) -> float:
        """Smallest figure against which an error is judged."""
        return max(SMALL * self.whole, LEAST_MEMORY_BYTES if self.section == "memory" else 0.0)

    @property
    def small(self) -> bool:
        """True if it is judged against a share of its whole, or against LEAST_MEMORY_BYTES."""
        at = self.reference
        return at is not None and abs(self.values[at] or 0.0) < self._least

    @property
    def known_twice(self) -> bool:
        """True if there are two figures to compare."""
        at = self.reference
        return self.tolerance is not None and at is not None and any(map(self._judged, range(at)))

    def agrees(self) -> bool:
        """Return True if every column is close enough to the reference."""
        return not self.beyond


def room_of_small_parts(tolerance: float) -> str:
    """Describe the tolerance of small parts."""
    return f"{tolerance:.0%} of a quarter of the sum (of memory: of 20 MiB, where that is more)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The table of all rows."""

    columns: Columns
    rows: tuple[ComparedRow, ...]
    rank: int
    """The rank that holds most, whose rows come first."""
    tolerance: float
    plan: Plan

    @property
    def judged(self) -> tuple[ComparedRow, ...]:
        """Rows that are known twice, at similar moments."""
        return tuple(row for row in self.rows if row.known_twice)

    @property
    def disagreeing(self) -> tuple[ComparedRow, ...]:
        """Rows beyond their tolerance, in order."""
        return tuple(row for row in self.rows if not row.agrees())


def compare(plan: Plan, columns: Columns, tolerance: float = 0.1) -> Comparison:
    """Compare the columns row by row."""
    rank = _fullest(plan, columns)
    ranks = pipeline_ranks(plan.layout)
    order = [rank, *(other for other in ranks if other != rank)]
    rows = [
        *(_peak_row(each, columns, tolerance) for each in ranks),
        *(row for each in order for row in _kind_rows(each, columns, tolerance)),
        *(row for each in order for row in _traffic_rows(each, columns, tolerance)),
        *(row for each in order for row in _training_rows(each, columns, tolerance)),
        *_time_rows(columns, tolerance),
        *_use_rows(columns),
    ]
    return Comparison(columns=columns, rows=tuple(rows), rank=rank, tolerance=tolerance, plan=plan)


def _fullest(plan: Plan, columns: Columns) -> int:
    """Return the rank with the highest peak among pipeline stages, by the best known column."""
    ranks = pipeline_ranks(plan.layout)
    # Best known first: measured, dry run, planned. A column counts only if it knows every stage.
    for column in reversed(columns):
        peaks = {
            record.rank: record.peak_bytes
            for record in (column.document.ranks if column.document else ())
            if record.peak_bytes
        }
        if all(rank in peaks for rank in ranks):
            return max(ranks, key=lambda rank: peaks[rank] or 0)
    return ranks[0]


def _three_values(value_of: Callable[[int], float | None]) -> Values:
    return value_of(0), value_of(1), value_of(2)


def _missing_reasons(columns: Columns, rank: int, measured: str) -> Reasons:
    """Return why columns lack a figure of a rank. `measured`: the reason for a run without a profile."""

    def reason(index: int) -> str:
        column = columns[index]
        if column.document is None:
            return column.about
        return measured if index == 2 else "" if column.rank(rank) else f"rank {rank} was not run"

    return reason(0), reason(1), reason(2)


def _peak_row(rank: int, columns: Columns, tolerance: float) -> ComparedRow:
    seen = [column.rank(rank) for column in columns]

    def peak(index: int) -> float | None:
        record = seen[index]
        return record.peak_bytes if record else None

    return ComparedRow(
        section="memory", what="peak", unit="bytes", rank=rank, values=_three_values(peak), tolerance=tolerance,
        missing=_missing_reasons(columns, rank, RESIDENT),
    )  # fmt: skip


def _kind_rows(rank: int, columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    seen = [column.rank(rank) for column in columns]
    kinds_of_columns = [{held.kind: held.bytes for held in record.memory} if record else {} for record in seen]
    # Training without a profile measures lasting states only, and at the optimizer's update.
    states_only = bool(kinds_of_columns[2]) and not any(kind not in STATES for kind in kinds_of_columns[2])
    reach: tuple[Sequence[str], ...] = (PLANNED, KINDS, STATES if states_only else KINDS)
    peak_bytes = max((record.peak_bytes or 0 for record in seen if record), default=0)
    reasons = _missing_reasons(columns, rank, STATES_ONLY)

    def held(index: int, kind: str) -> float | None:
        return kinds_of_columns[index].get(kind, 0) if kinds_of_columns[index] and kind in reach[index] else None

    moments = {
        index: AT_UPDATE if index == 2 and states_only else moment(record)
        for index, record in enumerate(seen)
        if record and kinds_of_columns[index]
    }
    aside = _columns_aside(moments)
    note = f"{'; '.join(f'{columns[index].title} {where}' for index, where in moments.items())}" if aside else ""
    copied = any(kinds.get("shards") for kinds in kinds_of_columns)
    for kind in PLANNED:
        values = held(0, kind), held(1, kind), held(2, kind)
        if not any(values):
            continue
        # What lasts is the same at any moment. Only passing kinds depend on where the peak lies.
        passing = kind in PASSING or (copied and kind in COPIES)
        yield ComparedRow(
            section="memory", what=kind, unit="bytes", rank=rank, values=values, whole=peak_bytes,
            tolerance=None if kind == "reserve" else tolerance,
            aside=aside if passing else (), note=note if passing else "",
            missing=(UNCOUNTED, "no tensor", "no tensor") if kind == "reserve" else (UNCOUNTED, *reasons[1:]),
        )  # fmt: skip


def moment(record: RankRecord) -> str:
    """Return where a peak occurs: at head and loss, in a forward or backward pass, or at the update."""
    words = record.when.replace(",", " ").split()
    if words and words[0] in ("update", "optimizer"):
        return AT_UPDATE
    if "head" not in words and "F" not in words:
        return "in a backward pass"
    logits = any(entry.kind == "logits" and entry.bytes for entry in record.memory)
    return "at head and loss" if logits else "in a forward pass"


def _columns_aside(moments: dict[int, str]) -> tuple[int, ...]:
    """Return the columns whose peak occurs elsewhere than the measured one; that one if plan and dry run agree."""
    # Plan and dry run outvote a measurement at another moment, since their parts can still be compared.
    plan_and_dry_run_agree = len(moments) == 3 and moments[0] == moments[1] != moments[2]
    best = moments[0 if plan_and_dry_run_agree else max(moments)] if moments else ""
    return tuple(index for index, where in moments.items() if where != best)


def _traffic_rows(rank: int, columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    """Yield traffic. `tolerance` applies to bytes that a router sends to experts; all else is exact."""
    seen = [column.rank(rank) for column in columns]
    sent = [
        None
        if record is None or record.traffic is None
        else {(entry.axis, entry.collective): entry for entry in record.traffic}
        for record in seen
    ]
    reasons = _missing_reasons(columns, rank, "the run left no ledger.json")

    def counted(index: int, key: tuple[str, str], unit: str) -> float | None:
        counts = sent[index]
        return None if counts is None else getattr(counts.get(key), unit, 0)

    for key in sorted({key for counts in sent if counts for key in counts}):
        for unit in ("bytes", "calls"):
            values = counted(0, key, unit), counted(1, key, unit), counted(2, key, unit)
            yield ComparedRow(
                section="traffic", what=" ".join(key), unit=unit, rank=rank, values=values, missing=reasons,
                tolerance=tolerance if key == ROUTED and unit == "bytes" else 0.0,
            )  # fmt: skip


def _training_rows(rank: int, columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    """Yield, in addition to a profile, a rank's peak in training, and traffic that differs from the profile's."""
    planned, dry, measured = columns
    if measured.trained is None:
        return
    record = next((record for record in measured.trained.ranks if record.rank == rank), None)
    if record is None:
        return
    trained_columns = planned, dry, replace(measured, document=measured.trained)
    if record.peak_bytes is not None:
        yield replace(_peak_row(rank, trained_columns, tolerance), what=f"peak{IN_TRAINING}")
    if record.traffic is None:
        return
    profiled = {(row.what, row.unit): row.values[2] for row in _traffic_rows(rank, columns, tolerance)}
    for row in _traffic_rows(rank, trained_columns, tolerance):
        if profiled.get((row.what, row.unit), 0) != row.values[2]:
            yield replace(row, what=row.what + IN_TRAINING)


def _timeless_reasons(columns: Columns) -> Reasons:
    planned, dry, measured = (column.timeless if column.document else column.about for column in columns)
    return planned, dry, measured


def _seconds_by_part(column: Column) -> dict[str, float]:
    """Return seconds by part. A clock counts waits for host memory as computing, Muon's products as the optimizer."""
    seconds_by_part = {part.what: part.seconds for part in column.document.time} if column.document else {}
    for part, within in (("offload", "compute"), ("muon", "optimizer")):
        if seconds := seconds_by_part.pop(part, 0.0):
            seconds_by_part[within] = seconds_by_part.get(within, 0.0) + seconds
    return seconds_by_part


def _time_rows(columns: Columns, tolerance: float) -> Iterator[ComparedRow]:
    parts_of_columns = [_seconds_by_part(column) for column in columns]
    totals = _three_values(lambda index: columns[index].document.step_seconds if columns[index].document else None)  # type: ignore[union-attr]  # asked in the same line
    step_seconds = next((total for total in reversed(totals) if total), 0.0)
    reasons = _timeless_reasons(columns)
    for what in (*TIMES, "data"):
        values = parts_of_columns[0].get(what), parts_of_columns[1].get(what), parts_of_columns[2].get(what)
        if any(values):
            missing = (reasons[0] or UNCOUNTED, *reasons[1:])
            yield ComparedRow(
                section="time", what=what, unit="seconds", values=values, whole=step_seconds, missing=missing,
                tolerance=tolerance,
            )  # fmt: skip
    yield ComparedRow(section="time", what="step", unit="seconds", values=totals, tolerance=tolerance, missing=reasons)


def _use_rows(columns: Columns) -> Iterator[ComparedRow]:
    """Yield figures that follow from the step's time, so none is judged again."""
    for name, title in USES.items():
        planned, dry, measured = _timeless_reasons(columns)
        if name in ("mfu_causal", "mfu_full", "hfu"):
            measured = "the peak of this device is not known" if columns[2].document else measured

        def use(index: int, name: str = name) -> float | None:
            document = columns[index].document
            return getattr(document, name) if document else None

        yield ComparedRow(
            section="use", what=title, unit=UNITS.get(name, "share"), values=_three_values(use),
            missing=(planned, dry, measured),
        )  # fmt: skip
