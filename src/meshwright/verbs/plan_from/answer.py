"""`plan --from`: a configuration of other training software: its needs, what makes it fit, what is faster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, checked
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.planning.layouts import SEARCHED, PlannedLayout, layout_cells, layout_html
from meshwright.interface.planning.plan_reading import Section, is_hub_name, read_folder, section_words
from meshwright.interface.planning.plan_request import MOST_NODES, config_folder
from meshwright.planner.explain import document
from meshwright.planner.search.ranking import search
from meshwright.planner.search.recommend import LayoutChange, cheapest_fixes, recommend
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec import Cluster, ModelShape, Plan, presets
from meshwright.spec.errors import ArgumentError, MeshwrightError, PlanError
from meshwright.spec.plan.plan import differences
from meshwright.stacks.config_files import ENDINGS, option_word
from meshwright.stacks.config_reading import ReadConfig, example, read
from meshwright.stacks.declaration.option import Form
from meshwright.stacks.declaration.software import TrainingSoftware, error_sentences

RECIPE = ("sequence", "global_batch", "precision", "steps", "learning_rate")


@dataclass(frozen=True, kw_only=True, repr=False)
class ConfigAnswer(Answer):
    """Memory and time of a configuration, and better layouts."""

    config: ReadConfig
    prediction: Prediction
    estimator: Estimator

    @property
    def software(self) -> TrainingSoftware:
        """The software of the configuration."""
        return self.config.software

    @property
    def plan(self) -> Plan:
        """The configuration as a plan."""
        return self.prediction.plan

    @property
    def given(self) -> PlannedLayout:
        """The layout of the configuration, with its cost."""
        return PlannedLayout(prediction=self.prediction)

    @property
    def fits(self) -> bool:
        """Does every device have room for it?"""
        return self.prediction.peak_bytes <= usable_bytes(self.plan)

    @cached_property
    def fixes(self) -> tuple[LayoutChange, ...]:
        """Changes that make it fit, the cheapest first. Empty = it fits."""

        def offered(layout: Any) -> bool:
            return not self.software.plan_refusal(replace(self.plan, layout=layout))

        return () if self.fits else tuple(cheapest_fixes(self.estimator, self.plan, offered=offered))

    @cached_property
    def best(self) -> PlannedLayout | None:
        """The best layout of the same software, model, batch and devices. None = none fits."""
        fixed = self.software.fixed()
        ranking = search(self.estimator, self.plan, fixed=fixed)
        if not ranking.best:
            return None
        return PlannedLayout(prediction=recommend(self.estimator, self.plan, ranking, fixed).best[0])

    def options(self, plan: Plan) -> str:
        """Return the options that turn the file into that plan, in the software's words.

        Without a name for the model there, return words of a layout.
        """
        try:  # adapters are part of no layout and of no written file
            old, new = (self.software.all_facts(replace(asked, model=asked.model.base)) for asked in (self.plan, plan))
        except PlanError:
            return differences(self.plan.layout, plan.layout)
        # Of a single file only its own options may change, and those of files that it names.
        files = self.software.files if self.config.paths[0].is_dir() else [self._file, *self.software.named_files]
        words = [
            word for file in files for word in _changed(file.form == "shell", file.settings(old), file.settings(new))
        ]
        return " ".join(dict.fromkeys(words)) or differences(self.plan.layout, plan.layout)

    @property
    def _file(self) -> Any:
        form = ENDINGS[self.config.paths[0].suffix]
        files = (*self.software.files, *self.software.also_read)
        return next(file for file in files if (file.form, file.name) == (form, self.config.file))

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright plan --from FILE --json` prints."""
        best = self.best
        return {
            "from": str(self.config.paths[0]), "for": self.software.word, "fits": self.fits,
            **document(self.prediction),
            "fixes": [_change_document(self, change.prediction) for change in self.fixes],
            "best": None if best is None else _change_document(self, best.prediction),
            "ignored": list(self.config.ignored), "not_known": list(self.config.unknown),
            "not_counted": [*self.config.bounds, *self.config.uncounted], "bound": bool(self.config.bounds),
            "known_errors": error_sentences(self.software),
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for the configuration and one for the best layout."""
        return [layout.row() for layout in (self.given, self.best) if layout is not None]

    def __repr__(self) -> str:
        return f"{self.plan.model.name} with {self.software.word}: {self.given}"

    def _repr_html_(self) -> str:
        changes = [("makes it fit", change.prediction) for change in self.fixes]
        changes += [("best", self.best.prediction)] if self.best else []
        cells = [
            (name, self.options(prediction.plan), *layout_cells(PlannedLayout(prediction=prediction))[1:])
            for name, prediction in changes
        ]
        names = ("change", "options", "step", "tokens/s per device", "MFU (full)", "memory", "bubble")
        return whole(
            line(f"{self.plan.model.name} with {self.software.word}"), layout_html(self.given), table(names, cells)
        )


def _change_document(answer: ConfigAnswer, prediction: Prediction) -> dict[str, Any]:
    return {
        "options": answer.options(prediction.plan), "step_seconds": prediction.step_s,
        "peak_bytes": round(prediction.peak_bytes), "times_as_fast": answer.prediction.step_s / prediction.step_s,
    }  # fmt: skip


def _changed(shell: bool, old: list[Any], new: list[Any]) -> list[str]:
    """Return `--key value` or `key=value` of each setting that differs. Removed ones are marked as such."""
    before = {setting.key: setting.value for setting in old}
    after = {setting.key: setting.value for setting in new}
    form: Form = "shell" if shell else "yaml"
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    words = [option_word(form, key, value) or f"(without {key})" for key, value in changed.items()]
    return words + [f"(without {key})" for key in before if key not in after]


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
    """Predict memory and time of a configuration of other training software, and what would be better.

    Args:
        file: A configuration, a folder of them, or FILE.py:function.
        model: Preset or folder, for files that name no model.
        cluster: Device and number per node, as "h100x8".
        nodes: Number of nodes, for files that do not say.
        layout: Settings that the file leaves to the user's script, as {"micro_batch": 1}.
        recipe: The same for the recipe, as {"sequence": 4096}.
        stack: Software of the file, when that is ambiguous.

    Raises:
        PlanError: A setting is not understood, or matters and is not counted. Names key and line.
    """
    named_shape = _shape(str(model)) if model else None
    config = read(
        str(file), stack, folder_shape=lambda folder: read_folder(folder).shape, hub_shape=_hub_shape, model=named_shape
    )
    shape = config.shape
    if shape is None:
        raise ArgumentError(
            "model",
            sentence=f"{file} names no model: give MODEL, a preset or a folder, as `{example(config.paths[0])}`",
        )
    if cluster is None:
        raise ArgumentError(
            "cluster",
            rule="is missing",
            remedy=f'{file} names no device; give one and how many a node has, as "h100x8"',
        )
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise ArgumentError("nodes", nodes, f"must be at least 1 and at most {MOST_NODES:,}")
    node = presets.cluster(cluster)
    # The user knows the cluster better than the file, which may come from another site.
    machine = replace(node, nodes=nodes or config.nodes(node.devices_per_node))
    # A file may be for fewer devices than the cluster has, and its batch is divided among these.
    config, machine = _with_its_devices(config, machine)
    changes = {
        **_changes(section_words(layout), SEARCHED, "layout"),
        **_changes(section_words(recipe), RECIPE, "recipe"),
    }
    plan = config.plan(shape, machine, changes)
    plan.check()
    # Some batches are legal here, and end that trainer with an error.
    if why := config.software.round_refusal(plan):
        raise PlanError(f"{file}: {why}: the run would end with an error")
    plan_estimator = build_estimator(plan, config.software.stack(config.facts))
    return ConfigAnswer(config=config, prediction=plan_estimator.predict(plan), estimator=plan_estimator)


def _shape(model: str) -> ModelShape:
    path = Path(model)
    folder = path.parent if path.name == "config.json" else path
    return read_folder(folder).shape if (folder / "config.json").is_file() else presets.model(model)


def _with_its_devices(config: ReadConfig, cluster: Cluster) -> tuple[ReadConfig, Cluster]:
    """Take as many devices as a file with a fixed number asks for, else add a note that the numbers differ."""
    devices = config.facts.get("devices")
    if not isinstance(devices, int) or devices < 1 or devices == cluster.devices:
        return config, cluster
    counted = f"the cluster has {cluster.devices}"
    if config.software.binds_devices and devices < cluster.devices and devices <= cluster.devices_per_node:
        cluster, counted = (
            replace(cluster, nodes=1, devices_per_node=devices),
            f"it is counted on {devices} of the cluster's",
        )
    note = f"The file is for {devices} device{'s' * (devices > 1)}: {counted}."
    return replace(config, uncounted=(*config.uncounted, note)), cluster


def _hub_shape(name: str) -> ModelShape | None:
    """Return the shape by config.json of the hub or its cache. None = neither has it, or it cannot be planned."""
    if not is_hub_name(name):
        return None
    try:
        return read_folder(config_folder(name)).shape
    except MeshwrightError:
        return None


def _changes(words: list[str], known: tuple[str, ...], where: str) -> Mapping[str, Any]:
    changes: dict[str, Any] = {}
    for word in ",".join(words).replace(",", " ").split():
        key, equals, text = word.partition("=")
        if key not in known or not equals:
            raise ArgumentError(where, word, remedy=f"take KEY=VALUE with one of {', '.join(known)}")
        changes[key] = int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)
    return changes
