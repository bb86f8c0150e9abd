"""Configuration files of training software, read as a plan: whose files they are, what they state, what is ignored."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.spec import Cluster, ModelShape, Plan, presets
from meshwright.spec.errors import ArgumentError, PlanError, argument
from meshwright.spec.hub_names import download_hint
from meshwright.spec.presets import suggest
from meshwright.stacks.config_files import ENDINGS, entries_of, form_of, option_word
from meshwright.stacks.declaration.option import OUTSIDE, ConfigFile, Entry, Facts
from meshwright.stacks.declaration.plan_facts import likely_preset, plan_of, preset_of_hub, shape_of
from meshwright.stacks.declaration.script_text import NAMED, SCRIPT
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.trainer_table import READ, SOFTWARE, software
from meshwright.stacks.trainers.accelerate_fsdp import ACCELERATE_FILE as LAUNCHER_FILE
from meshwright.stacks.trainers.deepspeed import JSON as SHARDING_FILE
from meshwright.stacks.trainers.hugging_face import LAUNCHER_KEYS

CODED = re.compile(r"gptq|awq|aqlm|hqq|w4a16|w8a8|int[48]\b|[48]bit|\bfp8\b")
"""Words in names of folders with quantized matrices."""
ReadFolder = Callable[[Path], ModelShape]
ReadHub = Callable[[str], ModelShape | None]
ABSENT = "is not beside the file, and may shard the run, which needs less memory: not counted."
"""End of the sentence about a file that another file names."""
OFF: tuple[Any, ...] = (None, 0, "none", "None", "false", "off", "no", "", "null", "cpu_off", {}, [])
"""Values besides False that turn an option off."""
DECIDES = re.compile(
    r"(^|[._-])(tp|pp|cp|sp|ep|autotp|autoep|((tensor|pipeline|context|sequence|expert|ulysses)_?(model_)?(parallel)?))"
    r"_?(world_)?(size|degree|stages|dim)$"
)
"""Keys that set how many ranks share the work. An unlisted one decides the answer all the same."""
PARTS = re.compile(r"(size|degree|parallelism|stages|instances|tiling)$")
"""Endings of keys that split something into parts or over ranks: 1 and -1 are off."""
FEWEST_KNOWN = 1 / 4
"""Smallest share of a file's keys that its software must know."""
OTHER_TRAINING = re.compile(r"(?<![a-z])(grpo|ppo|kto|rloo|reward(ing)?|distill(ation)?|gkd|rlhf|rm)(?![a-z])")
"""Words in names of programs that compare or reward answers."""
NO_TRAINING = re.compile(
    r"^(?!.*(train|tun|sft|clm)).*(generat|inference|export|convert|quantiz|evaluat|(?<![a-z])(eval|serve|ptq|prompt)(?![a-z]))"
)
"""Words in names of programs that train nothing."""
PAIRS = re.compile(r"(?<![a-z])(dpo|orpo|simpo|cpo)(?![a-z])")
"""Words in names of programs that compare pairs of answers."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Sources for the shape of the model that a file names."""

    folder: ReadFolder | None
    hub: ReadHub | None
    chosen: ModelShape | None

    def shape(self, software: TrainingSoftware, facts: Facts, path: Path, notes: list[str]) -> ModelShape | None:
        """Return the model that the file names, or None. A guess is added to the notes."""
        # Names of the software itself come first: a flavor such as 8B means nothing on the Hub.
        shape = software.shape(facts)
        if shape is not None:
            return shape
        name = facts.get("hub")
        if not isinstance(name, str) or not name:
            return None
        if coded := CODED.search(name.lower()):
            notes.append(f"{coded[0]} in {name}: frozen matrices are counted in 16 bits where no option says fewer.")
        preset = preset_of_hub(name)
        if preset is not None:
            return preset
        folder = next(
            (candidate for candidate in (Path(name), path.parent / name) if (candidate / "config.json").is_file()), None
        )
        if folder is not None and self.folder is not None:
            return self.folder(folder)
        shape = self.hub(name) if self.hub is not None else None
        if shape is not None:
            return shape
        likely = likely_preset(name)
        if likely is not None:
            notes.append(f"The model {name} is taken as {likely.name}, by its name: give MODEL for another.")
            return likely
        if name.startswith(OUTSIDE):
            raise PlanError(
                f"{path}: model {name} is set outside the file: give MODEL, a preset or a folder, as `{example(path)}`"
            )
        near = suggest(name.rstrip("/").rpartition("/")[2].lower(), presets.model_names())
        raise PlanError(
            f"{path}: model {name!r} is not known here: give MODEL, a preset or a folder with its config.json, as "
            f"`{example(path)}`; {near}{download_hint(name)}"
        )


def example(path: Path) -> str:
    """Return a command that passes a known model in addition to the file."""
    return f"meshwright plan llama-3.1-8b --from {path.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """Statements of configuration files."""

    software: TrainingSoftware
    paths: tuple[Path, ...]
    facts: Facts
    """Common facts and facts of the software alone."""
    shape: ModelShape | None
    """Shape of the model. None = the files do not tell."""
    file: str
    """Name that the software gives the first file."""
    ignored: tuple[str, ...]
    """Options that change neither memory nor time."""
    unknown: tuple[str, ...]
    """Options that no list here contains. They may matter."""
    uncounted: tuple[str, ...] = ()
    """Sentences about options that matter and differ from the value that is counted."""
    bounds: tuple[str, ...] = ()
    """Sentences about options that save memory or time uncounted: the run needs less than predicted."""

    def nodes(self, devices_per_node: int) -> int:
        """Return the number of nodes that the files state, or 1."""
        nodes, devices = self.facts.get("nodes"), self.facts.get("devices")
        if isinstance(devices, int) and devices > 0 and devices % devices_per_node == 0:
            return devices // devices_per_node
        return nodes if isinstance(nodes, int) and nodes > 0 else 1

    def plan(self, shape: ModelShape, cluster: Cluster, changes: Mapping[str, Any]) -> Plan:
        """Return the plan on a cluster, with changed facts.

        Raises PlanError if files contradict themselves or state too little.
        """
        try:
            return plan_of({**self.facts, "devices_per_node": cluster.devices_per_node, **changes}, shape, cluster)
        except PlanError as error:
            raise error.reworded(f"{self.paths[0]}: ") from None


def read(
    file_or_folder: str, word: str = "", *, folder_shape: ReadFolder | None = None, hub_shape: ReadHub | None = None,
    model: ModelShape | None = None,
) -> ReadConfig:  # fmt: skip
    """Read a file, a folder of files, or FILE.py:function.

    Args:
        file_or_folder: Path, or FILE.py:function.
        word: Software of the files, if known.
        folder_shape: Reads the shape of a model from a folder.
        hub_shape: Reads the shape of a model by its name on the Hub, for names without a preset.
        model: Shape of the model, whatever the files state.
    """
    if word and word not in READ:
        known = software(word)  # raises for an unknown word
        raise ArgumentError(
            "stack", known.word, "has no public files", f"leave it out; {argument('source')} reads {', '.join(READ)}"
        )
    path, function = _split(file_or_folder)
    named_model = NamedModel(folder_shape, hub_shape, model)
    if path.is_dir():
        whose, files = _software_of_folder(path, word)
        return _read(whose, [(file, entries_of(path / file.name)) for file in files], path, named_model)
    if not path.is_file():
        raise ArgumentError("source", path, "is no file and no folder", f"give a configuration of {', '.join(READ)}")
    entries = entries_of(path, function)
    whose, file = _software_of_file(path, entries, word)
    return _read(whose, [(file, entries)], path, named_model)


def _split(text: str) -> tuple[Path, str]:
    head, colon, function = text.rpartition(":")
    # Paths of Windows hold a colon too, so only one behind .py counts.
    return (Path(head), function) if colon and head.endswith(".py") else (Path(text), "")


def _software_of_folder(path: Path, word: str) -> tuple[TrainingSoftware, list[ConfigFile]]:
    """Return the software that most files of a folder fit, with these files."""
    names = {entry.name for entry in path.iterdir()}
    candidates = [
        (stack, files)
        for stack in SOFTWARE.values()
        if word in ("", stack.word) and (files := [file for file in stack.files if file.name in names])
    ]
    if not candidates:
        raise PlanError(f"{path}: no file that --for writes; give the configuration file itself")
    best = max(len(files) / len(stack.files) + len(files) for stack, files in candidates)
    best_candidates = [pair for pair in candidates if len(pair[1]) / len(pair[0].files) + len(pair[1]) == best]
    # Folders of several programs may hold files of the same names; the launch script says who wrote them.
    if len(best_candidates) > 1 and not word:
        best_candidates = [pair for pair in best_candidates if _launches(path, pair[0].word)] or best_candidates
    if len(best_candidates) > 1:
        raise PlanError(
            f"{path}: files of {' or '.join(stack.word for stack, _ in best_candidates)}: name the program with --for"
        )
    software, files = best_candidates[0]
    return software, files


def _launches(path: Path, word: str) -> bool:
    return f"--for {word}:" in _launch_text(path)


def _nodes_of(path: Path) -> int | None:
    """Return the number of nodes in the launch script next to the files. Files of several trainers lack it."""
    line = re.search(r"^NNODES=(\d{1,6})$", _launch_text(path), re.MULTILINE)
    return int(line[1]) if line else None


def _launch_text(path: Path) -> str:
    launch = path / "launch.sh"
    return launch.read_text(encoding="utf-8", errors="replace") if launch.is_file() else ""


def _software_of_file(path: Path, entries: Sequence[Entry], word: str) -> tuple[TrainingSoftware, ConfigFile]:
    """Return the software whose table knows most options of the file."""
    form = form_of(path)
    scripts = [entry.value for entry in entries if entry.key == SCRIPT]
    keys = {entry.key for entry in entries} | {f"{SCRIPT}:{script}" for script in scripts}
    # Small bonuses break ties: files that the software itself reads, and files with keys of their own.
    scored = [
        (_known(file, keys) + 0.0001 * (file in stack.files) + 0.0002 * bool(file.marks), stack, file)
        for stack in READ.values()
        if word in ("", stack.word)
        for file in (*stack.files, *stack.also_read)
        if file.form == form
    ]
    best = max((score for score, *_ in scored), default=0.0)
    # A better reason than "no option is known", where the name of the program tells it.
    other = next((script for script in scripts if OTHER_TRAINING.search(str(script).lower())),
                 next((entry.key for entry in entries if OTHER_TRAINING.match(entry.key.lower())), ""))  # fmt: skip
    if best < 1 and other:
        raise PlanError(f"{path}: {other} is of a program that compares or rewards answers, which is not counted")
    if best < 1:
        programs = ", ".join([word] if word else READ)
        raise PlanError(f"{path}: no option of {programs} is in it: give --for, or another file ({', '.join(ENDINGS)})")
    best_by_word = {stack.word: (stack, file) for score, stack, file in scored if score == best}
    known_keys = max(sum(map(file.knows, keys)) for _, file in best_by_word.values())
    # A file of some other program shares a few common keys with every trainer.
    if not word and form in ("yaml", "toml") and known_keys < FEWEST_KNOWN * len(keys):
        raise PlanError(
            f"{path} fits no program: {known_keys} of its {len(keys)} keys are known, to "
            f"{' or '.join(best_by_word)}. Name its program with --for"
        )
    if len({id(file) for _, file in best_by_word.values()}) > 1:
        raise PlanError(f"{path} fits {' and '.join(best_by_word)}: name the program with --for")
    # Software that takes the same file is tried in the order of the table.
    return next(iter(best_by_word.values()))


def _known(file: ConfigFile, keys: set[str]) -> float:
    if file.marks and not keys & set(file.marks):
        return 0.0
    # The launcher's options stand before the script of any trainer, so they point to none.
    keys = keys - LAUNCHER_KEYS
    return sum(file.option(key) is not None for key in keys) + 0.01 * sum(map(file.knows, keys))


def _read(
    software: TrainingSoftware, files: Sequence[tuple[ConfigFile, Sequence[Entry]]], path: Path, named: NamedModel
) -> ReadConfig:
    facts: Facts = {"nodes": _nodes_of(path)} if path.is_dir() else {}
    facts["file_name"] = path.stem
    notes = FileNotes()
    for file, entries in files:
        file_path = path / file.name if path.is_dir() else path
        file_facts = _facts(file, entries, file_path, notes)
        # Of several files the last one that states a fact wins; an open fact replaces nothing.
        facts.update({name: value for name, value in file_facts.items() if value is not None or name not in facts})
        with notes.collected(f"{file_path}, "):
            facts.update(software.noticed(entries))
        values_by_key = {entry.key: entry.value for entry in entries}
        notes.uncounted += filter(
            None, (option.note(values_by_key.get(option.key, option.absent)) for option in file.unread)
        )
    _read_named(facts, path, notes)
    shape = named.chosen
    with notes.collected():
        shape = named.chosen or named.shape(software, facts, path, notes.uncounted)
    if shape is not None:
        # Some trainers state stages by their layers, so the model is needed before facts are resolved.
        facts["layers"] = shape.layers
    scripts = [str(entry.value) for _, entries in files for entry in entries if entry.key == SCRIPT]
    # A job may convert and then train: it is refused only if none of its programs trains.
    if scripts and all(NO_TRAINING.search(script.lower()) for script in scripts):
        notes.objections.append(f"{path}: {scripts[0]} trains nothing")
    notes.objections += [f"{path}: {sentence}" for sentence in software.objections(facts)]
    notes.bounds += software.bounds(facts)
    with notes.collected(f"{path}: "):
        facts = software.resolve(facts)
        shape = shape or shape_of(facts)
    # All reasons are known now, so one run names them together.
    notes.check(path)
    software = software.variant(software, facts) if software.variant else software
    return ReadConfig(
        software=software, paths=(path,), facts=facts, shape=shape, file=files[0][0].name,
        ignored=tuple(notes.ignored), unknown=tuple(notes.unknown), uncounted=tuple(notes.uncounted),
        bounds=tuple(dict.fromkeys(notes.bounds)),
    )  # fmt: skip


@dataclass(slots=True)
class FileNotes:
    """Notes on files, gathered along with their facts."""

    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self, where: str = "") -> Iterator[None]:
        """Record a PlanError and continue, so that all reasons are reported together."""
        try:
            yield
        except PlanError as error:
            self.objections.append(f"{where}{error}")

    def check(self, path: Path) -> None:
        """Raise PlanError that lists every objection."""
        reasons = list(dict.fromkeys(self.objections))
        if len(reasons) == 1:
            raise PlanError(reasons[0])
        if reasons:
            listed = "; ".join(reason.removeprefix(str(path)).lstrip(",: ") for reason in reasons)
            raise PlanError(f"{path}: {len(reasons)} reasons why it is not counted: {listed}")


def _facts(file: ConfigFile, entries: Sequence[Entry], path: Path, notes: FileNotes) -> Facts:
    """Return the facts of a file. The last occurrence counts; uncounted or unclear values are added to the notes."""
    facts: Facts = {}
    for option in file.options:
        if option.default is not None:
            facts[option.fact] = option.read(Entry(key=option.key, value=option.default, line=0))
    for entry in entries:
        setting, off = f"{entry.key}={entry.value}", is_off(entry.key, entry.value)
        matching = file.option(entry.key)
        if matching is not None:
            with notes.collected(f"{path}, "):
                facts[matching.fact] = matching.read(entry)
        # Judged for the whole file in _read, where an absent option has a meaning too.
        elif entry.key in {option.key for option in file.unread}:
            continue
        elif entry.key in file.refused and not off:
            why = file.refused[entry.key]
            ending = "" if why.endswith("not counted") else ": not counted here"
            notes.objections.append(f"{path}, line {entry.line}: {setting} {why}{ending}")
        elif entry.key in file.bounded and not off:
            notes.bounds.append(f"{setting.lower()} {file.bounded[entry.key]}: not counted.")
        elif file.knows(entry.key):
            with notes.collected():
                _check_fixed(file, entry, path)
            notes.ignored.append(entry.key)
        # An option on no list that splits the work decides the answer, so it is an error and no remark.
        elif DECIDES.search(entry.key.lstrip("-").replace("-", "_")):
            if not off:
                why = "says how many ranks share the work, and is not counted here"
                notes.objections.append(f"{path}, line {entry.line}: {setting} {why}")
        elif entry.key == SCRIPT and (pairs := PAIRS.search(str(entry.value).lower())):
            facts["preference"] = pairs[0]
        elif entry.key == SCRIPT and OTHER_TRAINING.search(str(entry.value).lower()):
            notes.objections.append(
                f"{path}, line {entry.line}: {entry.value} compares or rewards answers, which is not counted here"
            )
        elif entry.key not in ("def", "=", "import", NAMED, SCRIPT) and entry.value not in (None, "", {}, []):
            notes.unknown.append(f"{entry.key} (line {entry.line})")
    return facts


def _read_named(facts: Facts, path: Path, notes: FileNotes) -> None:
    """Add facts of the accelerate and DeepSpeed files that options name, or guess them from the names of these files.

    A guess by name is reported. Without a clue the run is counted unsharded, which bounds its memory from above.
    """
    launcher = facts.get("accelerate_file")
    if isinstance(launcher, str) and launcher:
        launcher_path = _beside(path, launcher)
        if launcher_path is not None:
            with notes.collected():
                named_facts = _facts(LAUNCHER_FILE, entries_of(launcher_path), launcher_path, notes)
                # A fact that the trainer's own file states wins over the launcher's.
                facts.update({fact: value for fact, value in named_facts.items() if facts.get(fact) is None})
        elif kind := re.search(r"(?:zero|stage)_?([0-3])(?!\d)|fsdp|multi_gpu|single_gpu", Path(launcher).name.lower()):
            kinds = {"fsdp": "FSDP", "multi_gpu": "MULTI_GPU", "single_gpu": "NO"}
            facts["distributed"] = kinds.get(kind[0], "DEEPSPEED")
            facts.setdefault("zero_stage", int(kind[1]) if kind[1] else None)
            notes.uncounted.append(f"{launcher} is not beside the file: taken as {kind[0]} by its name.")
        else:
            notes.bounds.append(f"{launcher} {ABSENT}")
    name = facts.get("deepspeed_file")
    if not isinstance(name, str) or not name:
        return
    facts["distributed"] = "DEEPSPEED"
    sharding_path = _beside(path, name)
    if sharding_path is not None:
        with notes.collected():
            named_facts = _facts(SHARDING_FILE, entries_of(sharding_path), sharding_path, notes)
            facts["zero_stage"] = named_facts.get("zero")
            wanted = ("micro_batch", "accumulation", "global_batch", "overlaps", "travels", "optimizer_type")
            facts.update({fact: named_facts[fact] for fact in wanted if named_facts.get(fact) not in (None, "auto")})
    elif stage := re.search(r"(?:z(?:ero)?_?(?:stage)?|stage)_?([0-3])(?!\d)", Path(name).name):
        facts["zero_stage"] = int(stage[1])
        notes.uncounted.append(f"{name} is not beside the file: taken as stage {stage[1]} of ZeRO by its name.")
    else:
        facts["zero_stage"] = 0
        notes.bounds.append(f"{name} {ABSENT}")


def _beside(path: Path, name: str) -> Path | None:
    """Return the path of a file that options name, looked up from their folder upwards."""
    start = path if path.is_dir() else path.parent
    # Names are relative to where the program is started, often the root of a repository above the file.
    return next((folder / name for folder in (start, *start.absolute().parents) if (folder / name).is_file()), None)


def is_off(key: str, value: Any) -> bool:
    """Return True if an option with this value has no effect."""
    # True == 1 in Python, so booleans are answered before the table of values.
    if isinstance(value, bool):
        return not value
    return value in OFF or (value in (1, -1) and PARTS.search(key) is not None)


def _check_fixed(file: ConfigFile, entry: Entry, path: Path) -> None:
    """Raise PlanError if an option that is written with one value for every plan has another."""
    # A fixed key that is also ignored was written for convenience, and any value will do.
    if entry.key not in file.fixed or file.ignores(entry.key):
        return
    counted_setting, _ = file.fixed[entry.key]
    if str(entry.value).lower() != str(counted_setting).lower():
        stated, counted = (option_word("yaml", entry.key, word) for word in (entry.value, counted_setting))
        raise PlanError(f"{path}, line {entry.line}: {stated} is not counted here: take {counted}")
