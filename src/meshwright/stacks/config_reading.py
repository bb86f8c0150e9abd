"""Files of options as a plan: whose they are, what they say, what was left aside."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.spec import Cluster, ModelShape, Plan
from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import ConfigFile, Facts
from meshwright.stacks.declaration.plan_facts import plan_of, shape_of
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.file_forms import ENDINGS, entries_of, form_of, option_word
from meshwright.stacks.named_models import NamedModel, ReadFolder, ReadHub
from meshwright.stacks.text.option_text import Entry
from meshwright.stacks.text.python_text import NAMED
from meshwright.stacks.text.shell_text import SCRIPT
from meshwright.stacks.trainer_table import READ, SOFTWARE, software
from meshwright.stacks.trainers.accelerate_fsdp import ACCELERATE_FILE as LAUNCHER_FILE
from meshwright.stacks.trainers.deepspeed import JSON as SHARDING_FILE
from meshwright.stacks.trainers.hugging_face import LAUNCHER_KEYS

ABSENT = "is not beside the file, and may shard the run, which needs less memory: not counted."
"""Of a file that another names."""
OFF: tuple[Any, ...] = (None, 0, "none", "None", "false", "off", "no", "", "null", "cpu_off", {}, [])
"""Values of an option that matters by which it is off, beside False."""
DECIDES = re.compile(
    r"(^|[._-])(tp|pp|cp|sp|ep|autotp|autoep|((tensor|pipeline|context|sequence|expert|ulysses)_?(model_)?(parallel)?))"
    r"_?(world_)?(size|degree|stages|dim)$"
)
"""Names of options that say how many ranks share the work: one that no table has decides the answer all the same."""
PARTS = re.compile(r"(size|degree|parallelism|stages|instances|tiling)$")
"""Ends of options that say in how many parts or ranks something is cut: 1 is off, and so is -1."""
FEWEST_KNOWN = 1 / 4
"""Share of a file's keys that its software has to know: below it, it is of another."""
OTHER_TRAINING = re.compile(r"(?<![a-z])(grpo|ppo|kto|rloo|reward(ing)?|distill(ation)?|gkd|rlhf|rm)(?![a-z])")
"""In the name of a program that rates or rewards answers."""
NO_TRAINING = re.compile(
    r"^(?!.*(train|tun|sft|clm)).*(generat|inference|export|convert|quantiz|evaluat|(?<![a-z])(eval|serve|ptq|prompt)(?![a-z]))"
)
"""In the name of a program that trains nothing."""
PAIRS = re.compile(r"(?<![a-z])(dpo|orpo|simpo|cpo)(?![a-z])")
"""In the name of one that compares pairs of answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """What files of options say."""

    software: TrainingSoftware
    paths: tuple[Path, ...]
    facts: Facts
    """Common ones and the software's own."""
    shape: ModelShape | None
    """Of the model; None = the files do not say."""
    file: str
    """What the software calls the first file."""
    ignored: tuple[str, ...]
    """Options that change neither memory nor time."""
    unknown: tuple[str, ...]
    """Options that are in no list here: they may matter."""
    uncounted: tuple[str, ...] = ()
    """A sentence for each option that matters, and has another value than is counted."""
    bounds: tuple[str, ...] = ()
    """A sentence for each option that saves memory or time and is not counted: the run needs less than is said."""

    def nodes(self, devices_per_node: int) -> int:
        """As the files say; 1 where they do not."""
        nodes, devices = self.facts.get("nodes"), self.facts.get("devices")
        if isinstance(devices, int) and devices > 0 and devices % devices_per_node == 0:
            return devices // devices_per_node
        return nodes if isinstance(nodes, int) and nodes > 0 else 1

    def plan(self, shape: ModelShape, cluster: Cluster, changes: Mapping[str, Any]) -> Plan:
        """On a cluster, with changes of facts; PlanError where files contradict themselves or say too little."""
        try:
            return plan_of({**self.facts, "devices_per_node": cluster.devices_per_node, **changes}, shape, cluster)
        except PlanError as error:
            raise type(error)(f"{self.paths[0]}: {error}") from None


def read(
    file_or_folder: str, word: str = "", *, folder_shape: ReadFolder | None = None, hub_shape: ReadHub | None = None,
    given: ModelShape | None = None,
) -> ReadConfig:  # fmt: skip
    """A file, a folder of files, or FILE.py:function. `word`: whose, where that is known; `given`: the model, whatever
    the file says. `hub_shape`: of a name of the hub that no table here has."""
    if word and word not in READ:
        software(word)
    path, function = _split(file_or_folder)
    named = NamedModel(folder_shape, hub_shape, given)
    if path.is_dir():
        whose, files = _of_folder(path, word)
        return _read(whose, [(file, entries_of(path / file.name)) for file in files], path, named)
    if not path.is_file():
        raise PlanError(f"source={str(path)!r} is no file and no folder: give a configuration of {', '.join(READ)}")
    entries = entries_of(path, function)
    whose, file = _whose(path, entries, word)
    return _read(whose, [(file, entries)], path, named)


def _split(text: str) -> tuple[Path, str]:
    head, colon, function = text.rpartition(":")
    return (Path(head), function) if colon and head.endswith(".py") else (Path(text), "")


def _of_folder(path: Path, word: str) -> tuple[TrainingSoftware, list[ConfigFile]]:
    """The software of whose files most are there."""
    have = {one.name for one in path.iterdir()}
    found = [
        (one, [file for file in one.files if file.name in have]) for one in SOFTWARE.values() if word in ("", one.word)
    ]
    found = [(one, files) for one, files in found if files]
    if not found:
        raise PlanError(f"{path}: no file that --for writes; give the configuration file itself")
    best = max(len(files) / len(one.files) + len(files) for one, files in found)
    first = [pair for pair in found if len(pair[1]) / len(pair[0].files) + len(pair[1]) == best]
    if len(first) > 1 and not word:
        first = [pair for pair in first if _says(path, pair[0].word)] or first
    if len(first) > 1:
        raise PlanError(f"{path}: files of {' or '.join(one.word for one, _ in first)}: say which by --for")
    software, files = first[0]
    return software, files


def _says(path: Path, word: str) -> bool:
    return f"--for {word}:" in _launch(path)


def _nodes_of(path: Path) -> int | None:
    """What the launch script says that was written beside the files: several trainers' own files do not."""
    said = re.search(r"^NNODES=(\d{1,6})$", _launch(path), re.MULTILINE)
    return int(said[1]) if said else None


def _launch(path: Path) -> str:
    launch = path / "launch.sh"
    return launch.read_text(encoding="utf-8", errors="replace") if launch.is_file() else ""


def _whose(path: Path, entries: Sequence[Entry], word: str) -> tuple[TrainingSoftware, ConfigFile]:
    """The software whose table knows most of the file's options."""
    form = form_of(path)
    keys = {entry.key for entry in entries} | {f"{SCRIPT}:{one.value}" for one in entries if one.key == SCRIPT}
    found = [
        (_known(file, keys) + 0.0001 * (file in one.files) + 0.0002 * bool(file.marks), one, file)
        for one in READ.values()
        if word in ("", one.word)
        for file in (*one.files, *one.also_read)
        if file.form == form
    ]
    best = max((score for score, *_ in found), default=0.0)
    other = next((one.value for one in entries if one.key == SCRIPT and OTHER_TRAINING.search(str(one.value).lower())),
                 next((one.key for one in entries if OTHER_TRAINING.match(one.key.lower())), ""))  # fmt: skip
    if best < 1 and other:
        raise PlanError(f"{path}: {other} is of a program that compares or rewards answers, which is not counted")
    if best < 1:
        known = ", ".join(word or one for one in ([word] if word else READ))
        raise PlanError(f"{path}: no option of {known} is in it: give --for, or another file ({', '.join(ENDINGS)})")
    first = {one.word: (one, file) for score, one, file in found if score == best}
    known_keys = max(sum(map(file.knows, keys)) for _, file in first.values())
    if not word and form in ("yaml", "toml") and known_keys < FEWEST_KNOWN * len(keys):
        raise PlanError(
            f"{path} fits no program: {known_keys} of its {len(keys)} keys are known, to "
            f"{' or '.join(first)}. Name its program with --for"
        )
    if len({id(file) for _, file in first.values()}) > 1:
        raise PlanError(f"{path} may be of {' or '.join(first)}: say which by --for")
    return next(iter(first.values()))  # of one file that several take, the first


def _known(file: ConfigFile, keys: set[str]) -> float:
    if file.marks and not keys & set(file.marks):
        return 0.0
    whose = keys - LAUNCHER_KEYS
    return sum(file.option(key) is not None for key in whose) + 0.01 * sum(map(file.knows, whose))


def _read(
    software: TrainingSoftware, files: Sequence[tuple[ConfigFile, Sequence[Entry]]], path: Path, named: NamedModel
) -> ReadConfig:
    facts: Facts = {"nodes": _nodes_of(path)} if path.is_dir() else {}
    facts["file_name"] = path.stem
    told = FileNotes()
    for file, entries in files:
        where = path / file.name if path.is_dir() else path
        said = _facts(file, entries, where, told)
        facts.update({name: value for name, value in said.items() if value is not None or name not in facts})
        with told.collected(f"{where}, "):
            facts.update(software.noticed(entries))
        given_values = {entry.key: entry.value for entry in entries}
        told.uncounted += filter(None, (one.note(given_values.get(one.key, one.absent)) for one in file.unread))
    _read_named(facts, path, told)
    shape = named.given
    with told.collected():
        shape = named.given or named.shape(software, facts, path, told.uncounted)
    if shape is not None:
        facts["layers"] = shape.layers
    scripts = [str(entry.value) for _, entries in files for entry in entries if entry.key == SCRIPT]
    if scripts and all(NO_TRAINING.search(script.lower()) for script in scripts):
        told.objections.append(f"{path}: {scripts[0]} trains nothing")
    told.objections += [f"{path}: {sentence}" for sentence in software.objections(facts)]
    told.bounds += software.bounds(facts)
    with told.collected(f"{path}: "):
        facts = software.resolve(facts)
        shape = shape or shape_of(facts)
    told.check(path)
    software = software.variant(software, facts) if software.variant else software
    return ReadConfig(
        software=software, paths=(path,), facts=facts, shape=shape, file=files[0][0].name,
        ignored=tuple(told.ignored), unknown=tuple(told.unknown), uncounted=tuple(told.uncounted),
        bounds=tuple(dict.fromkeys(told.bounds)),
    )  # fmt: skip


@dataclass(slots=True)
class FileNotes:
    """What is to be said of files beside their facts."""

    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self, where: str = "") -> Iterator[None]:
        """Go on after a PlanError: all reasons are told together."""
        try:
            yield
        except PlanError as error:
            self.objections.append(f"{where}{error}")

    def check(self, path: Path) -> None:
        """PlanError with every reason, if there is one."""
        reasons = list(dict.fromkeys(self.objections))
        if len(reasons) == 1:
            raise PlanError(reasons[0])
        if reasons:
            listed = "; ".join(one.removeprefix(str(path)).lstrip(",: ") for one in reasons)
            raise PlanError(f"{path}: {len(reasons)} reasons why it is not counted: {listed}")


def _facts(file: ConfigFile, entries: Sequence[Entry], path: Path, told: FileNotes) -> Facts:
    """What one file says; the last word counts. Values that are not understood or not counted are told of."""
    facts: Facts = {}
    for option in file.options:
        if option.default is not None:
            facts[option.fact] = option.value(Entry(key=option.key, value=option.default, line=0))
    for entry in entries:
        said, off = f"{entry.key}={entry.value}", is_off(entry.key, entry.value)
        option_ = file.option(entry.key)
        if option_ is not None:
            with told.collected(f"{path}, "):
                facts[option_.fact] = option_.value(entry)
        elif entry.key in {one.key for one in file.unread}:
            continue
        elif entry.key in file.refused and not off:
            why = file.refused[entry.key]
            ending = "" if why.endswith("not counted") else ": not counted here"
            told.objections.append(f"{path}, line {entry.line}: {said} {why}{ending}")
        elif entry.key in file.bounded and not off:
            told.bounds.append(f"{said.lower()} {file.bounded[entry.key]}: not counted.")
        elif file.knows(entry.key):
            with told.collected():
                _check_fixed(file, entry, path)
            told.ignored.append(entry.key)
        elif DECIDES.search(entry.key.lstrip("-").replace("-", "_")):
            if not off:
                why = "says how many ranks share the work, and is not counted here"
                told.objections.append(f"{path}, line {entry.line}: {said} {why}")
        elif entry.key == SCRIPT and (pairs := PAIRS.search(str(entry.value).lower())):
            facts["preference"] = pairs[0]
        elif entry.key == SCRIPT and OTHER_TRAINING.search(str(entry.value).lower()):
            told.objections.append(
                f"{path}, line {entry.line}: {entry.value} compares or rewards answers, which is not counted here"
            )
        elif entry.key not in ("def", "=", "import", NAMED, SCRIPT) and entry.value not in (None, "", {}, []):
            told.unknown.append(f"{entry.key} (line {entry.line})")
    return facts


def _read_named(facts: Facts, path: Path, told: FileNotes) -> None:
    """Add what files of accelerate and DeepSpeed say that options name: where they lie, else by their names."""
    launcher = facts.get("accelerate_file")
    if isinstance(launcher, str) and launcher:
        found = _beside(path, launcher)
        if found is not None:
            with told.collected():
                said = _facts(LAUNCHER_FILE, entries_of(found), found, told)
                facts.update({fact: value for fact, value in said.items() if facts.get(fact) is None})
        elif kind := re.search(r"(?:zero|stage)_?([0-3])(?!\d)|fsdp|multi_gpu|single_gpu", Path(launcher).name.lower()):
            kinds = {"fsdp": "FSDP", "multi_gpu": "MULTI_GPU", "single_gpu": "NO"}
            facts["distributed"] = kinds.get(kind[0], "DEEPSPEED")
            facts.setdefault("zero_stage", int(kind[1]) if kind[1] else None)
            told.uncounted.append(f"{launcher} is not beside the file: taken as {kind[0]} by its name.")
        else:
            told.bounds.append(f"{launcher} {ABSENT}")
    name = facts.get("deepspeed_file")
    if not isinstance(name, str) or not name:
        return
    facts["distributed"] = "DEEPSPEED"
    found = _beside(path, name)
    if found is not None:
        with told.collected():
            said = _facts(SHARDING_FILE, entries_of(found), found, told)
            facts["zero_stage"] = said.get("zero")
            wanted = ("micro_batch", "accumulation", "global_batch", "overlaps", "travels", "optimizer_type")
            facts.update({fact: said[fact] for fact in wanted if said.get(fact) not in (None, "auto")})
    elif stage := re.search(r"(?:z(?:ero)?_?(?:stage)?|stage)_?([0-3])(?!\d)", Path(name).name):
        facts["zero_stage"] = int(stage[1])
        told.uncounted.append(f"{name} is not beside the file: taken as stage {stage[1]} of ZeRO by its name.")
    else:
        facts["zero_stage"] = 0
        told.bounds.append(f"{name} {ABSENT}")


def _beside(path: Path, name: str) -> Path | None:
    """A file that options name, from their own folder or one above it."""
    here = path if path.is_dir() else path.parent
    return next((folder / name for folder in (here, *here.absolute().parents) if (folder / name).is_file()), None)


def is_off(key: str, value: Any) -> bool:
    """Whether an option of this value does nothing."""
    if isinstance(value, bool):
        return not value
    return value in OFF or (value in (1, -1) and PARTS.search(key) is not None)


def _check_fixed(file: ConfigFile, entry: Entry, path: Path) -> None:
    """PlanError where an option that matters, and is written with one value for every plan, has another."""
    if entry.key not in file.fixed or file.ignores(entry.key):
        return
    value, _ = file.fixed[entry.key]
    if str(entry.value).lower() != str(value).lower():
        said, known = (option_word("yaml", entry.key, one) for one in (entry.value, value))
        raise PlanError(f"{path}, line {entry.line}: {said} is not counted here: take {known}")
