"""Lines of time: what a rank computes and sends, as the planner says of a cluster and as this machine runs it.

    python -m benchmarks.timelines data                    # without overlap and with it
    python -m benchmarks.timelines tensor                  # the exchanges of tensor parallelism
    python -m benchmarks.timelines context                 # ring and all-gather
    python -m benchmarks.timelines pipeline                # afab, 1f1b, interleaved, zb-h1
    python -m benchmarks.timelines data --planned          # the planner's half alone, at once
    python -m benchmarks.timelines data --picture lines.png

The planner's half is Llama-3.1-8B on the H100 of one node: four layers of it, and all 32 in a pipeline. The measured
half is a small model on two processes of this machine's CPU: the shortest of four steps of `meshwright profile`. So
compare shapes, not seconds. Whoever comes first to a collective waits for the others, which on a shared CPU is most of
what is seen as exposed.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.planner.cost.block import first_half, layer, with_attention_kind
from meshwright.planner.cost.stage_costs import PassSeconds, block_time
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout.replay import replay
from meshwright.spec.layout.schedule import KINDS, schedule

COMPUTES, SENDS = "computes", "communicates"
LAYERS = 4
FORWARD, BACKWARD = ("forward", "#1f5fa8"), ("backward", "#d9661f")
COLLECTIVE, EXPOSED = ("collective", "#3a8f5c"), ("exposed communication", "#b3261e")
MEANINGS = {
    "forward": FORWARD, "F": FORWARD, "backward": BACKWARD, "B": BACKWARD, "BW": BACKWARD,
    "W": ("gradients of weights", "#7a4fa3"), "sum": COLLECTIVE, "collective": COLLECTIVE,
    "exposed exchange": EXPOSED, "exposed wait": EXPOSED,
}  # fmt: skip
"""Label of a piece -> its name in the legend, and colour."""
SMALL = (
    "model=llama-10m",
    f"model.layers={LAYERS}",
    "recipe.sequence=128",
    "recipe.global_batch=8",
    "recipe.precision=fp32",
)
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "overlap=on": {"dp_replicate": 8},
        "overlap=off": {"dp_replicate": 8, "overlap": "off"},
    },
    "tensor": {
        "sp, overlap=on": {"tp": 8, "sp": True},
        "sp, overlap=off": {"tp": 8, "sp": True, "overlap": "off"},
    },
    "context": {
        "context=all-gather": {"cp": 8, "context": "all-gather"},
        "context=ring": {"cp": 8},
    },
    "pipeline": {
        name: {"pp": 4, "schedule": name, "vp": KINDS[name].stages} for name in ("afab", "1f1b", "interleaved", "zb-h1")
    },
}
"""Name -> case -> its layout on the cluster."""
PLANNED_WORK = {
    "data": f"{LAYERS} layers of llama-3.1-8b, 8,192 tokens per rank; the gradients of a layer are a bucket",
    "tensor": f"{LAYERS} layers of llama-3.1-8b, a sequence of 8,192 tokens",
    "context": f"{LAYERS} layers of llama-3.1-8b, a sequence of 8,192 tokens",
    "pipeline": "32 layers of llama-3.1-8b, eight micro-batches of 8,192 tokens",
}
MEASURED_WORK = f"{LAYERS} layers of llama-10m, 8 sequences of 128 tokens, fp32"
"""What each half is of."""
AXES = {"data": "dp_replicate", "tensor": "tp", "context": "cp", "pipeline": "pp"}
NARROW = 0.006
"""Pieces below this share of the line are drawn without an edge, which would hide them."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One thing on a line of time."""

    line: str
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The lines of one case. `exposed_s`: communication and bubble beside which the busiest rank computes nothing."""

    pieces: tuple[Piece, ...]
    exposed_s: float

    @property
    def total_s(self) -> float:
        """Until the last piece has ended."""
        return max(piece.end_s for piece in self.pieces)


class Rank:
    """A rank's two lines, on each of which one thing follows another."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.free = {COMPUTES: 0.0, SENDS: 0.0}

    def run(self, line: str, label: str, seconds: float, ready_s: float = 0.0) -> float:
        """Begin once it is ready and the line is free. Returns its end."""
        start_s = max(self.free[line], ready_s)
        self.free[line] = start_s + seconds
        if seconds:
            self.pieces.append(Piece(line=line, label=label, start_s=start_s, end_s=self.free[line]))
        return self.free[line]

    def lines(self) -> Lines:
        """What was run."""
        worked = sum(piece.end_s - piece.start_s for piece in self.pieces if piece.line == COMPUTES)
        return Lines(pieces=tuple(self.pieces), exposed_s=max(self.free.values()) - worked)


def estimator_of(layout: Layout, batch: int, layers: int = LAYERS) -> Estimator:
    """The planner of an 8B model of so many layers on a node of eight H100."""
    model = replace(presets.model("llama-3.1-8b"), layers=layers)
    recipe = Recipe(sequence=8192, global_batch=batch, precision="bf16")
    return build_estimator(
        Plan(model=model, recipe=recipe, layout=layout, cluster=presets.cluster(f"h100x{layout.world}", 1))
    )


def planned_data(layout: Layout) -> Lines:
    """One micro-batch: layers forward and backward, and the sum of each layer's gradients."""
    estimator = estimator_of(layout, layout.dp)
    block = estimator.costs.parts(layout)[1].dense
    sum_s = sharing(
        estimator.shape, layout, StageContents((0,), False, False), estimator.links, 2.0, 4.0, False
    ).reduce_s
    rank = Rank()
    for _ in range(LAYERS):
        rank.run(COMPUTES, "forward", block.forward_s)
    ends = [rank.run(COMPUTES, "backward", block.backward_s) for _ in range(LAYERS)]
    for end_s in ends:
        ready_s = end_s if layout.overlap == "on" else ends[-1]
        hides = max(ready_s, rank.free[SENDS]) < ends[-1]
        rank.run(SENDS, "sum" if hides else "exposed exchange", sum_s, ready_s)
    return rank.lines()


def planned_exchanges(layout: Layout) -> Lines:
    """One micro-batch: each layer computes, beside its end hidden exchanges, and behind it exposed ones."""
    estimator = estimator_of(layout, 1)
    local, _ = estimator.costs.parts(layout)
    half = first_half(with_attention_kind(local, 0, state=False))
    block = layer(local, window=0, routed=False, state=False, attention=half)
    time, rank = block_time(block, local, estimator.speeds, estimator.links), Rank()
    alone = PassSeconds(local=local, links=estimator.links, speeds=estimator.speeds, slower=1.0)
    passes = ("forward", *time.forward), ("backward", time.inputs[0] + time.weights_s, time.inputs[1])
    for label, whole_s, exposed_s in passes:
        exchanges = [exchange for op in block.operations for exchange in getattr(op.exchanges, label)]
        hidden_s = max(0.0, sum(map(alone.exchange_seconds, exchanges)) - exposed_s)
        for _ in range(LAYERS):
            end_s = rank.run(COMPUTES, label, whole_s - exposed_s, rank.free[SENDS])
            rank.run(SENDS, "collective", hidden_s, end_s - hidden_s)
            rank.run(SENDS, "exposed exchange", exposed_s, end_s)
    return rank.lines()


def planned_pipeline(layout: Layout) -> Lines:
    """Eight micro-batches through the schedule, in the planner's seconds."""
    estimator = estimator_of(layout, 8, 32)
    stages = estimator.costs.stages(layout, estimator.costs.pass_terms(layout))
    played = replay(schedule(layout.schedule, layout.pp, 8, layout.vp), stages, estimator.costs.send_s(layout))
    pieces = [
        Piece(line=f"rank {rank}", label=span.action.kind, start_s=span.start_s, end_s=span.end_s)
        for rank, spans in enumerate(played.spans)
        for span in spans
    ]
    busiest = max(sum(span.end_s - span.start_s for span in spans) for spans in played.spans)
    return Lines(pieces=tuple(pieces), exposed_s=played.total_s - busiest)


PLANNED = {
    "data": planned_data, "tensor": planned_exchanges, "context": planned_exchanges, "pipeline": planned_pipeline,
}  # fmt: skip


def planned(name: str) -> dict[str, Lines]:
    """The planner's lines of every case."""
    cases = CASES[name].items()
    return {case: PLANNED[name](Layout(micro_batch=1, compile="off", **degrees)) for case, degrees in cases}


def small_layout(degrees: dict[str, Any]) -> list[str]:
    """The same layout over two processes, as words of a command."""
    halved = {key: 2 if key in AXES.values() else setting for key, setting in degrees.items()}
    micro_batch = 1 if "pp" in degrees else 4
    return [f"layout.{key}={str(setting).lower()}" for key, setting in {**halved, "micro_batch": micro_batch}.items()]


def measured(name: str) -> dict[str, Lines]:
    """The shortest of four steps of each case, profiled on two processes of this machine."""
    import meshwright as mw

    lines = {}
    for case, degrees in CASES[name].items():
        with tempfile.TemporaryDirectory() as folder:
            mw.profile(*SMALL, f"run={folder}", *small_layout(degrees), steps=4)
            events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        lines[case] = of_trace(events, by_rank=name == "pipeline")
    return lines


def of_trace(events: list[dict[str, Any]], *, by_rank: bool) -> Lines:
    """The shortest step of a trace: of rank 0, or of each rank its passes alone. Nothing computes while it waits."""
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    timed = [event for event in events if event["ph"] == "X"]
    steps = [event for event in timed if event["name"].startswith("step ")]
    # The shortest step is the one that other programs disturbed least.
    shortest = min((event for event in steps if event["pid"] == 0), key=lambda event: event["dur"])
    spans = {
        event["pid"]: (event["ts"], event["ts"] + event["dur"])
        for event in steps
        if event["name"] == shortest["name"] and (by_rank or event["pid"] == 0)
    }
    zero = min(begin for begin, _ in spans.values())
    pieces: list[Piece] = []
    for rank, (begin, end) in spans.items():
        mine = [event for event in timed if event["pid"] == rank and begin <= event["ts"] < end]
        waits = [event for event in mine if threads.get((rank, event.get("tid"))) == "waiting"]
        waiting = sorted((event["ts"], min(end, event["ts"] + event["dur"])) for event in waits)
        if not by_rank:
            pieces += [piece_of(SENDS, "exposed wait", span, zero) for span in waiting]
        for event in mine:
            if event in steps or event in waits:
                continue
            line, label = f"rank {rank}" if by_rank else COMPUTES, event["name"].split()[0]
            span = event["ts"], min(end, event["ts"] + event["dur"])
            pieces += [piece_of(line, label, part, zero) for part in without(span, waiting)]
    begin, end = spans[0]
    if not by_rank:
        pieces += list(calls(events, begin, end))
    if by_rank:
        busiest = max(
            sum(piece.end_s - piece.start_s for piece in pieces if piece.line == f"rank {rank}") for rank in spans
        )
        total_s = max(piece.end_s for piece in pieces)
        return Lines(pieces=tuple(pieces), exposed_s=total_s - busiest)
    waited = sum(event["dur"] for event in timed if event["pid"] == 0 and begin <= event["ts"] < end
                 and threads.get((0, event.get("tid"))) == "waiting")  # fmt: skip
    return Lines(pieces=tuple(pieces), exposed_s=waited / 1e6)


def piece_of(line: str, label: str, span: tuple[float, float], zero: float) -> Piece:
    """A piece of a span in the microseconds of a trace."""
    return Piece(line=line, label=label, start_s=(span[0] - zero) / 1e6, end_s=(span[1] - zero) / 1e6)


def without(span: tuple[float, float], holes: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What is left of a span between holes, which are in order."""
    begin, end = span
    for hole_begin, hole_end in holes:
        if begin < hole_begin < end:
            yield begin, hole_begin
        if hole_begin < end:
            begin = max(begin, hole_end)
    if begin < end:
        yield begin, end


def calls(events: list[dict[str, Any]], begin: float, end: float) -> Iterator[Piece]:
    """Collectives of rank 0 under way: pairs of events that begin and end with one id."""
    starts = {
        (event["id"], event["name"], event["tid"]): event["ts"]
        for event in events
        if event["ph"] == "b" and event["pid"] == 0
    }
    for event in events:
        if event["ph"] != "e" or event["pid"] != 0 or not begin <= event["ts"] <= end:
            continue
        start = starts[event["id"], event["name"], event["tid"]]
        if start >= begin:
            yield Piece(
                line=SENDS, label="collective", start_s=(start - begin) / 1e6, end_s=(event["ts"] - begin) / 1e6
            )


def draw(name: str, halves: dict[str, dict[str, Lines]], file: Path) -> None:
    """Draw a panel for each case, the planned ones first."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    sheet = Figure(figsize=(7.5, 0.7 + 1.1 * len(CASES[name]) * len(halves)), layout="constrained", facecolor="white")
    panels = iter(sheet.subplots(len(CASES[name]) * len(halves), 1, squeeze=False).flat)
    used: dict[str, str] = {}
    for half, lines_of in halves.items():
        longest = max(lines.total_s for lines in lines_of.values())
        digits = 1 if longest < 0.1 else 0
        for case, lines in lines_of.items():
            axes, names = next(panels), sorted({piece.line for piece in lines.pieces})
            # Waits are drawn last, over the collectives that they wait for.
            for piece in sorted(lines.pieces, key=lambda piece: piece.label == "exposed wait"):
                meaning, color = MEANINGS.get(piece.label, ("sums, norm and update", "#999999"))
                used[meaning] = color
                low, length = -names.index(piece.line), piece.end_s - piece.start_s
                edge = 0.4 if length > NARROW * longest else 0.0
                axes.add_patch(Rectangle((1e3 * piece.start_s, low), 1e3 * length, 0.85, facecolor=color,
                                         edgecolor="white", linewidth=edge))  # fmt: skip
            axes.set_xlim(0, 1.02e3 * longest)
            axes.set_ylim(1 - len(names) - 0.1, 1)
            axes.set_yticks([0.43 - index for index in range(len(names))], names, fontsize=8)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            share = f", {lines.exposed_s / lines.total_s:.0%} {'idle' if name == 'pipeline' else 'exposed'}"
            axes.set_title(f"{half}: {case}, {1e3 * lines.total_s:,.{digits}f} ms{share}", loc="left", fontsize=9)
        axes.set_xlabel("ms", fontsize=8)
    names = sorted(used, key=[*dict(MEANINGS.values()), *used].index)
    marks = [Rectangle((0, 0), 1, 1, facecolor=used[name]) for name in names]
    sheet.legend(marks, names, loc="outside lower center", ncols=min(len(names), 3), fontsize=8, frameon=False)
    sheet.savefig(file, dpi=110)


def main() -> None:
    """Plan and measure one kind of parallelism."""
    reader = argparse.ArgumentParser(description="Lines of time, planned and measured.")
    reader.add_argument("name", choices=sorted(CASES), help="what to show")
    reader.add_argument("--planned", action="store_true", help="leave the measured half out")
    reader.add_argument("--picture", type=Path, metavar="FILE.png", help="draw both halves")
    options = reader.parse_args()
    axis = AXES[options.name]
    degree = next(iter(CASES[options.name].values()))[axis]
    shown = axis.removesuffix("_replicate")
    halves = {f"planned, {shown}={degree} on H100": planned(options.name)}
    if not options.planned:
        halves[f"measured, {shown}=2 on a CPU"] = measured(options.name)
    lost = "idle" if options.name == "pipeline" else "exposed"
    for half, lines_of in halves.items():
        print(half)
        print(f"  {MEASURED_WORK if half.startswith('measured') else PLANNED_WORK[options.name]}")
        for case, lines in lines_of.items():
            share = lines.exposed_s / lines.total_s
            print(f"  {case:<24}{1e3 * lines.total_s:>10.2f} ms, {lost} {1e3 * lines.exposed_s:>8.2f} ms ({share:.0%})")
    if options.picture:
        draw(options.name, halves, options.picture)
        print(f"written to {options.picture}")


if __name__ == "__main__":
    main()
