"""`plan --from`: a configuration of another training software, what it will need, what makes it fit, what is faster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.api.answer import Answer
from meshwright.api.arguments import checked
from meshwright.api.hub_configs import config_folder, is_hub_name
from meshwright.api.layout_argument import SEARCHED
from meshwright.api.markup import line, table, whole
from meshwright.api.plan_reading import Section, read_folder, section_words
from meshwright.api.plan_request import MOST_NODES
from meshwright.api.planned_layout import PlannedLayout, layout_cells, layout_html
from meshwright.planner.plan_document import document
from meshwright.planner.search.changes import LayoutChange, cheapest_fixes
from meshwright.planner.search.ranking import search
from meshwright.planner.search.recommend import recommend
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec import Cluster, ModelShape, Plan, presets
from meshwright.spec.errors import ArgumentError, MeshwrightError, PlanError
from meshwright.spec.worlds import differences
from meshwright.stacks.config_reading import ReadConfig, read
from meshwright.stacks.declaration.option import Form
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.file_forms import ENDINGS, option_word
from meshwright.stacks.named_models import example
from meshwright.stacks.stack_errors import sentences

RECIPE = ("sequence", "global_batch", "precision", "steps", "learning_rate")


@dataclass(frozen=True, kw_only=True, repr=False)
class ConfigAnswer(Answer):
    """What a configuration will need and take."""

    config: ReadConfig
    prediction: Prediction
    estimator: Estimator

    @property
    def software(self) -> TrainingSoftware:
        """Whose configuration this is."""
        return self.config.software

    @property
    def plan(self) -> Plan:
        """The same as a plan."""
        return self.prediction.plan

    @property
    def given(self) -> PlannedLayout:
        """Its layout, with what it would cost."""
        return PlannedLayout(prediction=self.prediction)

    @property
    def fits(self) -> bool:
        """Whether every device has room for it."""
        return self.prediction.peak_bytes <= usable_bytes(self.plan)

    @cached_property
    def fixes(self) -> tuple[LayoutChange, ...]:
        """Changes that make it fit, the cheapest first; empty where it fits."""

        def offered(layout: Any) -> bool:
            return not self.software.plan_refusal(replace(self.plan, layout=layout))

        return () if self.fits else tuple(cheapest_fixes(self.estimator, self.plan, offered=offered))

    @cached_property
    def best(self) -> PlannedLayout | None:
        """The best layout of the same software, model, batch and devices; None where none fits."""
        fixed = self.software.fixed()
        found = search(self.estimator, self.plan, fixed=fixed)
        if not found.best:
            return None
        return PlannedLayout(prediction=recommend(self.estimator, self.plan, found, fixed).best[0])

    def options(self, plan: Plan) -> str:
        """What makes the file that plan, in the software's own words; in words of a layout where it has no name for the
        model."""
        try:  # adapters are no part of a layout, and of no file that is written
            old, new = (self.software.all_facts(replace(one, model=one.model.base)) for one in (self.plan, plan))
        except PlanError:
            return differences(self.plan.layout, plan.layout)
        told = self.software.files if self.config.paths[0].is_dir() else [self._file, *self.software.named_files]
        words = [said for one in told for said in _changed(one.form == "shell", one.settings(old), one.settings(new))]
        return " ".join(dict.fromkeys(words)) or differences(self.plan.layout, plan.layout)

    @property
    def _file(self) -> Any:
        form = ENDINGS[self.config.paths[0].suffix]
        files = (*self.software.files, *self.software.also_read)
        return next(one for one in files if (one.form, one.name) == (form, self.config.file))

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright plan --from FILE --json` prints."""
        best = self.best
        return {
            "from": str(self.config.paths[0]), "for": self.software.word, "fits": self.fits,
            **document(self.prediction),
            "fixes": [_told(self, one.prediction) for one in self.fixes],
            "best": None if best is None else _told(self, best.prediction),
            "ignored": list(self.config.ignored), "not_known": list(self.config.unknown),
            "not_counted": [*self.config.bounds, *self.config.uncounted], "bound": bool(self.config.bounds),
            "known_errors": sentences(self.software),
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """A row for the configuration, one for the best layout."""
        return [one.row() for one in (self.given, self.best) if one is not None]

    def __repr__(self) -> str:
        return f"{self.plan.model.name} with {self.software.word}: {self.given}"

    def _repr_html_(self) -> str:
        changes = [("makes it fit", one.prediction) for one in self.fixes]
        changes += [("best", self.best.prediction)] if self.best else []
        cells = [
            (name, self.options(one.plan), *layout_cells(PlannedLayout(prediction=one))[1:]) for name, one in changes
        ]
        names = ("change", "options", "step", "tokens/s per device", "MFU (full)", "memory", "bubble")
        return whole(
            line(f"{self.plan.model.name} with {self.software.word}"), layout_html(self.given), table(names, cells)
        )


def _told(answer: ConfigAnswer, one: Prediction) -> dict[str, Any]:
    return {
        "options": answer.options(one.plan), "step_seconds": one.step_s, "peak_bytes": round(one.peak_bytes),
        "times_as_fast": answer.prediction.step_s / one.step_s,
    }  # fmt: skip


def _changed(shell: bool, old: list[Any], new: list[Any]) -> list[str]:
    """`--key value` or `key=value` of each setting that differs; what is gone is said to be."""
    before = {one.key: one.value for one in old}
    after = {one.key: one.value for one in new}
    form: Form = "shell" if shell else "yaml"
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    found = [option_word(form, key, value) or f"(without {key})" for key, value in changed.items()]
    return found + [f"(without {key})" for key in before if key not in after]


@checked
def plan_from(
    file: str | Path,
    *,
    model: str | Path = "",
    cluster: str | None = None,
    nodes: int | None = None,
    layout: Section = None,
    recipe: Section = None,
    stack: str = "",
) -> ConfigAnswer:
    """What a configuration of another training software will need, and what would be better.

    `file`: a configuration, a folder of them, or FILE.py:function. `model`, `nodes`: where the file does not say.
    `cluster`: as "h100x8". `layout`, `recipe`: what the file leaves to the user's script: {"micro_batch": 1},
    {"sequence": 4096}. `stack`: whose file it is, where that is not plain.

    PlanError with key and line for what is not understood, or matters and is not counted.
    """
    named_shape = _shape(str(model)) if model else None
    config = read(str(file), stack, folder_shape=_folder_shape, hub_shape=_hub_shape, model=named_shape)
    shape = config.shape
    if shape is None:
        raise ArgumentError(
            f"{file} does not say which model it trains: give MODEL, a preset or a folder, as "
            f"`{example(config.paths[0])}`"
        )
    if cluster is None:
        raise ArgumentError(
            f'cluster= is missing: {file} names no device; give one and how many a node has, as "h100x8"'
        )
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise ArgumentError(f"nodes={nodes} must be at least 1 and at most {MOST_NODES:,}")
    one = presets.cluster(cluster)
    where = replace(one, nodes=nodes or config.nodes(one.devices_per_node))
    config, where = _bound(config, where)
    changes = {
        **_changes(section_words(layout), SEARCHED, "layout"),
        **_changes(section_words(recipe), RECIPE, "recipe"),
    }
    plan = config.plan(shape, where, changes)
    plan.check()
    if why := config.software.round_refusal(plan):
        raise PlanError(f"{file}: {why}: the run would end with an error")
    plan_estimator = build_estimator(plan, config.software.stack(config.facts))
    return ConfigAnswer(config=config, prediction=plan_estimator.predict(plan), estimator=plan_estimator)


def _shape(model: str) -> ModelShape:
    path = Path(model)
    folder = path.parent if path.name == "config.json" else path
    return read_folder(folder).shape if (folder / "config.json").is_file() else presets.model(model)


def _bound(found: ReadConfig, cluster: Cluster) -> tuple[ReadConfig, Cluster]:
    """As many devices as the file asks for, where its batch is over these; elsewhere a note where they differ."""
    asked = found.facts.get("devices")
    if not isinstance(asked, int) or asked < 1 or asked == cluster.devices:
        return found, cluster
    counted = f"the cluster has {cluster.devices}"
    if found.software.binds_devices and asked < cluster.devices and asked <= cluster.devices_per_node:
        cluster, counted = (
            replace(cluster, nodes=1, devices_per_node=asked),
            f"it is counted on {asked} of the cluster's",
        )
    note = f"The file is for {asked} device{'s' * (asked > 1)}: {counted}."
    return replace(found, uncounted=(*found.uncounted, note)), cluster


def _hub_shape(name: str) -> ModelShape | None:
    """By the config.json of the hub or its cache; None where neither has it, or the planner has no such model."""
    if not is_hub_name(name):
        return None
    try:
        return read_folder(config_folder(name)).shape
    except MeshwrightError:
        return None


def _folder_shape(folder: Path) -> ModelShape:
    return read_folder(folder).shape


def _changes(words: list[str], known: tuple[str, ...], where: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for word in ",".join(words).replace(",", " ").split():
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            raise ArgumentError(f"{where}={word!r}: take KEY=VALUE with one of {', '.join(known)}")
        found[key] = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
    return found
