"""`plan --sweep KEY=A,B,...`: what `plan` recommends for each value of one key, or of two, as one table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import HEAD, curve, line, step_length, table, whole
from meshwright.interface.planning.layouts import CARRIED, DEGREES, WORDS, PlannedLayout, parse_part
from meshwright.interface.planning.plan_reading import Section, section_words
from meshwright.interface.terminal.screen_text import width, wrapped
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit, MeshwrightError, Writer, write_in_python
from meshwright.spec.presets import suggest
from meshwright.spec.units import GB, GIB
from meshwright.verbs.plan.answer import plan

CLUSTER_KEYS = ("cluster", "nodes")
WHOLE = "layout"
"""Key whose values are several fields each: `layout=dp_shard=32 zero=3; tp=8 dp_shard=4`."""
LAYOUT_KEYS = (*DEGREES, *WORDS, *CARRIED)
MOST_ROWS = 100
COLUMNS = {
    "tokens/s per GPU": "tok/s/GPU", "change": "change", "MFU": "MFU", "step": "step", "GiB": "GiB",
    "act. GiB": "act. GiB", "exposed": "exposed", "bubble": "bubble",
}  # fmt: skip
"""Title of a column on the page -> on the terminal."""
LENGTHS = {name: max(8, len(title)) for name, title in COLUMNS.items()}
PARTS = {
    "weights": ("parameters", "shards"), "grads": ("gradients",), "optim.": ("masters", "moments", "counters"),
    "act.": ("activations",),
}  # fmt: skip
"""Column of the table by part -> kinds of memory in it."""
PART_COLUMNS = (*PARTS, "other", "peak", "sent GB")
Keys = dict[str, str]
"""Swept key -> its value in a row."""


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One value of each swept key, with the layout that `plan` recommends for it."""

    keys: Keys
    planned: PlannedLayout | None = None
    """The nearest layout where none fits. None = none is legal."""
    error: MeshwrightError | None = None
    """The reason why no layout can be recommended. None = there is one."""

    @property
    def refused(self) -> str:
        """The reason in words, with arguments as in Python. Empty = there is none."""
        return "" if self.error is None else str(self.error)

    @property
    def fitting(self) -> PlannedLayout | None:
        """The recommended layout. None = refused."""
        return None if self.error else self.planned

    @property
    def exposed_seconds(self) -> float:
        """Communication of a step that no computation hides: exchanges, gathers and sums. 0 = refused."""
        time = {} if self.planned is None else self.planned.time
        return sum(time.get(part, 0.0) for part in ("exchange", "weights", "gradients"))

    @property
    def activations_bytes(self) -> int:
        """Activations of the fullest rank at its peak. 0 = refused."""
        return 0 if self.planned is None else self.planned.memory.get("activations", 0)

    @property
    def sent_bytes(self) -> float:
        """Bytes that the first rank sends in a step, all collectives together. 0 = refused."""
        return 0.0 if self.planned is None else sum(sent for *_, sent in self.planned.prediction.traffic())

    def part_cells(self) -> tuple[str, ...]:
        """Return the text of each of PART_COLUMNS, also of a layout that does not fit. Empty = none is legal."""
        if self.planned is None:
            return ()
        parts = [sum(self.planned.memory.get(kind, 0) for kind in kinds) for kinds in PARTS.values()]
        other = self.planned.peak_bytes - sum(parts)
        gib = [f"{size / GIB:.1f}" for size in (*parts, other, self.planned.peak_bytes)]
        return (*gib, f"{self.sent_bytes / GB:.1f}")


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepAnswer(Answer):
    """A row for every combination of values, in the order given."""

    names: tuple[str, ...]
    """The swept keys."""
    sweep_rows: tuple[SweepRow, ...]
    words: tuple[str, ...] = ()
    """Fields of the layout that are the same in all rows. The others are searched for each row."""

    @cached_property
    def first_rate(self) -> float:
        """Tokens/s per device of the first row with a layout, to which `change` refers. 0 = there is none."""
        return next((row.fitting.tokens_per_second_per_device for row in self.sweep_rows if row.fitting), 0.0)

    @property
    def title(self) -> str:
        """The model and all that is the same in every row."""
        plan = next(row.planned for row in self.sweep_rows if row.planned).plan
        cluster, recipe = plan.cluster, plan.recipe
        nodes = "nodes of " if "nodes" in self.names else f"{cluster.nodes} x "
        machine = "" if "cluster" in self.names else f" on {nodes}{cluster.devices_per_node} {cluster.device.name}"
        swept = any(name.startswith("recipe.") for name in self.names)
        batch = "" if swept else f", {recipe.global_batch} x {recipe.sequence:,} tokens per step, {recipe.precision}"
        return f"{plan.model.name}{machine}{batch}"

    @property
    def rule(self) -> str:
        """A sentence on fixed fields and on those that each row searches."""
        free = "" if any(word.startswith("micro_batch=") for word in self.words) else ", micro_batch included"
        fixed = f"Fixed: {' '.join(self.words)}. " if self.words else ""
        return f"{fixed}Each row is the layout that plan recommends: what is not fixed is searched anew{free}."

    def rows(self) -> list[dict[str, Any]]:
        """Return figures and layout of each row, named as in the document of `plan`."""
        rows = []
        for row in self.sweep_rows:
            figures = row.planned.row() if row.planned else {}
            if row.planned:
                figures |= {"activations_bytes": row.activations_bytes, "exposed_seconds": row.exposed_seconds,
                            "sent_bytes": row.sent_bytes, "memory": row.planned.memory,
                            "nodes": row.planned.plan.cluster.nodes}  # fmt: skip
            rows.append({"swept": dict(row.keys), "fits": not row.refused, "refused": row.refused, **figures})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `plan --sweep --json` prints."""
        return {"sweep": list(self.names), "title": self.title, "fixed": list(self.words), "rows": self.rows()}

    def cells(self, row: SweepRow) -> dict[str, str]:
        """Return the text of each of COLUMNS. Empty = refused."""
        if (planned := row.fitting) is None:
            return {}
        rate = planned.tokens_per_second_per_device
        change = rate / self.first_rate - 1
        cells = (
            f"{rate:,.0f}", f"{change:+.0%}" if round(100 * change) else "0%", f"{planned.mfu_full:.1%}",
            step_length(planned.step_seconds), f"{planned.peak_bytes / GIB:.1f}{'!' if planned.tight else ''}",
            f"{row.activations_bytes / GIB:.1f}", f"{row.exposed_seconds / planned.step_seconds:.1%}",
            f"{planned.time['bubble'] / planned.step_seconds:.1%}",
        )  # fmt: skip
        return dict(zip(COLUMNS, cells, strict=True))

    def lines(self, write: Writer = write_in_python, details: bool = False) -> Iterator[str]:
        """Yield the answer for the terminal. `write` writes the arguments in reasons. `details`: also each part."""
        yield from wrapped(self.title, width())
        yield from wrapped(self.rule, width())
        yield ""
        # Whole layouts have a number: their fields are in the line below.
        layouts = list(dict.fromkeys(row.keys.get(WHOLE) for row in self.sweep_rows))
        keys = [
            [f"{layouts.index(text) + 1}" if name == WHOLE else text for name, text in row.keys.items()]
            for row in self.sweep_rows
        ]
        widths = [max(map(len, column)) for column in zip(self.names, *keys, strict=True)]

        def lead(words: Iterable[str]) -> str:
            return "  " + "  ".join(f"{word:<{size}}" for word, size in zip(words, widths, strict=True))

        # The table is as wide as a terminal without one of these two.
        about_memory = "recompute" in self.names or "recompute_layers" in self.names
        piped = not about_memory and any(row.fitting and row.fitting.time["bubble"] for row in self.sweep_rows)
        columns = [name for name in COLUMNS if name != ("act. GiB" if piped else "bubble")]
        yield lead(self.names) + "".join(f" {COLUMNS[name]:>{LENGTHS[name]}}" for name in columns)
        for row, words in zip(self.sweep_rows, keys, strict=True):
            values = lead(words)
            if row.fitting:
                cells = self.cells(row)
                yield values + "".join(f" {cells[name]:>{LENGTHS[name]}}" for name in columns)
                yield from wrapped(row.fitting.words, width(), " " * (len(values) + 2))
            elif row.error:
                whole_layout = f"{row.keys[WHOLE]}: " if WHOLE in row.keys else ""
                yield from wrapped(f"{whole_layout}{row.error.written(write)}", width(), f"{values}  ")
        yield ""
        if any(row.fitting and row.fitting.tight for row in self.sweep_rows):
            yield "  ! hardly any memory is left: it may not fit."
        yield from wrapped(EXPLAINED + ("" if piped else ACTIVATIONS), width(), "  ")
        if details:
            yield ""
            yield lead(self.names) + "".join(f"{title:>9}" for title in PART_COLUMNS)
            for row, words in zip(self.sweep_rows, keys, strict=True):
                yield lead(words) + "".join(f"{cell:>9}" for cell in row.part_cells())
            yield ""
            yield from wrapped(PARTS_EXPLAINED, width(), "  ")

    def page(self) -> str:
        """Return one HTML page: a picture of throughput over the first key, and the table."""
        title = f"<title>Sweep over {' and '.join(self.names)}</title>"
        return f'{HEAD}{title}</head><body style="margin: 1.5rem">{self._repr_html_()}</body></html>'

    def _repr_html_(self) -> str:
        body = []
        for row in self.sweep_rows:
            cells = self.cells(row) or dict.fromkeys(COLUMNS, "")
            body.append((*row.keys.values(), *cells.values(), row.fitting.words if row.fitting else row.refused))
        parts = [(*row.keys.values(), *row.part_cells()) for row in self.sweep_rows if row.planned]
        return whole(line(self.title), line(self.rule), self._picture(), line(EXPLAINED + ACTIVATIONS),
                     table((*self.names, *COLUMNS, "layout, or why there is none"), body),
                     table((*self.names, *PART_COLUMNS), parts), line(PARTS_EXPLAINED))  # fmt: skip

    def _picture(self) -> str:
        """Return throughput per device over the first key, a line for each value of the second."""
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in self.sweep_rows:
            across, *rest = row.keys.values()
            if row.fitting and across.isdecimal():
                name = f"{self.names[1]}={rest[0]}" if rest else "predicted"
                lines.setdefault(name, []).append((float(across), row.fitting.tokens_per_second_per_device))
        return curve(lines, self.names[0], "tokens/s per GPU") if lines else ""

    def __repr__(self) -> str:
        return "\n".join(self.lines())


EXPLAINED = (
    "change: throughput against the first row. exposed: share of the step for exchanges, gathers and sums during "
    "which nothing is computed."
)
ACTIVATIONS = " act.: activations at the peak, a part of GiB."
PARTS_EXPLAINED = (
    "GiB at the peak of the fullest device, also where it does not fit: weights with own shards, gradients, optimizer "
    "states, activations. sent GB: by the first rank in a step."
)


@checked
def plan_sweep(
    model: str | Path | Plan | HasPlan,
    sweeps: Sequence[str] | Mapping[str, Any],
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    layout: Section = None,
    recipe: Section = None,
    tune: str = "",
    memory: float | None = None,
    stack: str = "",
    document_tokens: float = 0.0,
) -> SweepAnswer:
    """Plan a model for every value of one key, or of two.

    Args:
        model: As for `plan`.
        sweeps: One or two keys with their values: ["tp=1,2,4"] or {"tp": [1, 2, 4]}. A key is `nodes`, `cluster`, a
            field of the layout, `recipe.KEY`, or `layout` with several fields per value, separated by semicolons.
        cluster: As for `plan`, as are all other arguments.
        nodes: Number of nodes.
        layout: Fixed fields, the same in all rows. The rest is searched for each row.
        recipe: Changes of the recipe, the same in all rows.
        tune: "full", "lora", "qlora" or "lora:64".
        memory: GiB of each device that a layout may use.
        stack: Training software to plan for.
        document_tokens: Average length of the packed document around a token.

    Raises:
        ArgumentError: A key cannot be swept.
        MeshwrightError: No row can be planned: the reason of the first.
    """
    values = _values(sweeps)
    for name, setting in (("cluster", cluster), ("nodes", nodes)):
        if name in values and setting is not None:
            raise ArgumentError(name, setting, "is swept", "leave one of them out")
    words, changes = section_words(layout), section_words(recipe)
    rows = []
    for combination in product(*values.values()):
        keys = dict(zip(values, combination, strict=True))
        degrees = [f"{key}={setting}" for key, setting in keys.items() if key in LAYOUT_KEYS]
        degrees += keys.get(WHOLE, "").replace(",", " ").split()
        more = [f"{key[7:]}={setting}" for key, setting in keys.items() if key.startswith("recipe.")]
        planned: PlannedLayout | None = None
        failure: MeshwrightError | None = None
        try:
            planned = plan(
                model, cluster=keys.get("cluster", cluster), nodes=int(keys["nodes"]) if "nodes" in keys else nodes,
                layout=[*words, *degrees], recipe=[*changes, *more], tune=tune, listed=1, memory=memory, stack=stack,
                document_tokens=document_tokens,
            ).best  # fmt: skip
        except DoesNotFit as error:
            failure = error
            if isinstance(error.answer, PlannedLayout):
                planned = error.answer
        except MeshwrightError as refusal:
            failure = refusal
        rows.append(SweepRow(keys=keys, planned=planned, error=failure))
    if rows[0].error is not None and all(row.planned is None for row in rows):
        raise rows[0].error  # a table of refusals alone answers nothing
    fixed = " ".join(words).replace(",", " ").split()
    return SweepAnswer(names=tuple(values), sweep_rows=tuple(rows), words=tuple(fixed))


def _values(sweeps: Sequence[str] | Mapping[str, Any]) -> dict[str, list[str]]:
    """Return {"tp": ["1", "2"]}. Raises ArgumentError for keys that no plan has, and for values twice."""
    pairs = sweeps.items() if isinstance(sweeps, Mapping) else (word.partition("=")[::2] for word in sweeps)
    values: dict[str, list[str]] = {}
    for key, listed in pairs:
        name = key.strip().removeprefix("layout.")
        texts = listed.split(";" if name == WHOLE else ",") if isinstance(listed, str) else listed
        settings = [str(setting).strip() for setting in texts]
        shown = f"{key}={','.join(settings)}"
        if name not in (WHOLE, *CLUSTER_KEYS, *LAYOUT_KEYS) and not name.startswith("recipe."):
            remedy = f"{name!r} cannot be swept; {suggest(name, [*CLUSTER_KEYS, *LAYOUT_KEYS], 1)}, or recipe.KEY"
            raise ArgumentError("sweep", shown, remedy=remedy)
        if name == WHOLE:
            shown, settings = f"{key}={listed}", [setting for setting in settings if setting]
        if not (settings and all(settings)) or len({*settings}) < len(settings) or name in values:
            remedy = "write layout='tp=8; dp_shard=8 zero=3'" if name == WHOLE else "write KEY=A,B,C"
            raise ArgumentError("sweep", shown, "must give each value once", remedy)
        parts = [f"{name}={setting}" for setting in settings if name in (*DEGREES, *WORDS)]
        parts += [part for setting in settings if name == WHOLE for part in setting.replace(",", " ").split()]
        for part in parts:
            parse_part(part, "sweep")
        if name == "nodes" and not all(setting.isdecimal() for setting in settings):
            raise ArgumentError("sweep", shown, remedy="nodes takes whole numbers of 1 or more")
        values[name] = settings
    swept_twice = [key for key in values if any(f"{key}=" in text for text in values.get(WHOLE, ()))]
    if swept_twice:
        raise ArgumentError("sweep", rule=f"has {swept_twice[0]} alone and in a whole layout: leave one of them out")
    rows = len([*product(*values.values())])
    if not 1 <= len(values) <= 2 or rows > MOST_ROWS:
        raise ArgumentError("sweep", rule=f"takes one key or two, and at most {MOST_ROWS} combinations of their values")
    return values
