"""Configuration files in their form (YAML, JSON, TOML, shell, Python), and those of a plan with its launch scripts."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import Called, ConfigFile, Entry, Facts, Form, Setting, flatten, nest
from meshwright.stacks.declaration.script_text import read_python, read_shell, write_python, write_shell
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware

VARIABLE = re.compile(r"\$\{(\.?[\w.]+)\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers that PyYAML reads as text: 3e-4 lacks a point."""
ENDINGS: Mapping[str, Form] = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".py": "python", ".sh": "shell",
    ".slurm": "shell",
    ".sbatch": "shell", ".bash": "shell", ".sub": "shell", ".args": "shell",
}  # fmt: skip
LARGEST_BYTES = 2**20
MARK = "Written by meshwright plan --for"
"""First words of every written file with comments. A file without them is never overwritten."""
TORCHRUN = "--nnodes $NNODES --nproc_per_node $GPUS --node_rank $NODE_RANK --master_addr $HEAD --master_port $PORT"
PORT = 29500


def write_yaml(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_yaml_lines(nest(settings), "")]) + "\n"


def _yaml_lines(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
            continue
        line = f"{indent}{key}: {_yaml_word(value.value)}"
        yield f"{line}  # {value.meaning}" if value.meaning else line


def _yaml_word(setting: Any) -> str:
    """Return a value in a single line that YAML and JSON both read."""
    # Words that YAML would read as something else, such as `no`, are quoted.
    if isinstance(setting, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", setting):
        return setting if yaml.safe_load(setting) == setting else json.dumps(setting)
    if isinstance(setting, float):
        # repr writes 1e-05, which YAML 1.1 reads as text for want of a point.
        return f"{setting:.10f}".rstrip("0") if 1e-9 < abs(setting) < 1 else repr(setting)
    return json.dumps(setting)


def read_yaml(text: str) -> list[Entry]:
    """Return every option with its line. Raises PlanError unless the text is a YAML mapping."""
    try:
        # Nodes instead of values, because only nodes know their lines.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise PlanError("line 1: no mapping of keys to values")
        return _interpolate(list(_yaml_entries(node, "")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise PlanError(f"line {mark.line + 1 if mark else 1}: no YAML ({getattr(error, 'problem', error)})") from None


def _interpolate(entries: list[Entry]) -> list[Entry]:
    """Replace `${a.b}` as a whole value by the value of that key, and `${.b}` by that of a sibling (OmegaConf)."""
    values = {entry.key: entry.value for entry in entries}

    def interpolated(entry: Entry) -> Any:
        name = VARIABLE.fullmatch(entry.value) if isinstance(entry.value, str) else None
        if name is None:
            return entry.value
        beside = entry.key.rpartition(".")[0] if name[1].startswith(".") else ""
        return values.get(f"{beside}{name[1]}", entry.value)

    return [replace(entry, value=interpolated(entry)) for entry in entries]


def _yaml_entries(node: yaml.MappingNode, prefix: str) -> Iterator[Entry]:
    for name, child in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(child, yaml.MappingNode) and child.value:
            yield from _yaml_entries(child, f"{key}.")
        else:
            yield Entry(key=key, value=_yaml_value(child), line=name.start_mark.line + 1)


def _yaml_value(node: yaml.Node) -> Any:
    """Return the value of a node without tags that create objects."""
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(inner) for inner in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _yaml_value(inner) for key, inner in node.value}
    if node.tag.startswith("tag:yaml.org,2002:"):
        # PyYAML follows YAML 1.1, where a number with an exponent needs a point.
        constructed = yaml.SafeLoader("").construct_object(node)
        return float(constructed) if isinstance(constructed, str) and NUMBER.fullmatch(constructed) else constructed
    return node.value


def write_json(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options as one document. The title is omitted."""
    return json.dumps(_json_values(nest(settings)), indent=2) + "\n"


def _json_values(tree: Any) -> Any:
    return {key: _json_values(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.value


def read_json(text: str) -> list[Entry]:
    """Return every option with the line of its last name. Raises PlanError unless the text is a JSON object."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}: no JSON ({error.msg})") from None
    if not isinstance(document, dict):
        raise PlanError("line 1: no JSON object")
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flatten(document)]


def line_of(text: str, key: str) -> int:
    """Return the line where the names of a dotted key follow each other. 0 = not in the text."""
    at = 0
    for name in key.split("."):
        match = re.compile(rf'["\[.\s]?\b{re.escape(name)}\b["\]]?').search(text, at)
        if match is None:
            return 0
        at = match.start()
    return text.count("\n", 0, at + 1) + 1


def write_toml(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_toml_tables(nest(settings), "")]) + "\n"


def _toml_tables(tree: dict[str, Any], table: str) -> Iterator[str]:
    # Plain keys come first: below the header of a table they would belong to that table.
    plain = {key: setting for key, setting in tree.items() if not isinstance(setting, dict)}
    if table and plain:
        yield ""
        yield f"[{table}]"
    for key, setting in plain.items():
        line = f"{key} = {_toml_word(setting.value)}"
        yield f"{line}  # {setting.meaning}" if setting.meaning else line
    for key, inner in tree.items():
        if isinstance(inner, dict):
            yield from _toml_tables(inner, f"{table}.{key}" if table else key)


def _toml_word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value)


def read_toml(text: str) -> list[Entry]:
    """Return every option with its line. Raises PlanError unless the text is TOML."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"no TOML ({error})") from None
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flatten(document)]


WRITERS: Mapping[Form, Callable[[Sequence[Setting], Sequence[str]], str]] = {
    "yaml": write_yaml, "json": write_json, "toml": write_toml,
    "shell": write_shell, "python": write_python,
}  # fmt: skip
READERS: Mapping[Form, Callable[[str], list[Entry]]] = {
    "yaml": read_yaml, "json": read_json, "toml": read_toml,
    "shell": read_shell, "python": read_python,
}  # fmt: skip


def text_of(file: ConfigFile, facts: Facts, title: Sequence[str]) -> str:
    """Return the text of a file for a plan with these facts."""
    body = WRITERS[file.form](file.settings(facts), title)
    if file.head is None:
        return body
    return '"""' + " ".join(title) + '"""\n\n' + file.head(facts) + body + file.tail


def option_words(file: ConfigFile, facts: Facts) -> dict[str, str]:
    """Return `--key value` or `key=value` of each option in a file for these facts, without switches that are off."""
    return {
        setting.key: word
        for setting in file.settings(facts)
        if (word := option_word(file.form, setting.key, setting.value))
    }


def option_word(form: Form, key: str, value: Any) -> str:
    """Return an option as written in prose, or an empty string for a shell switch that is off."""
    shown = value.name if isinstance(value, Called) else str(value).lower() if isinstance(value, bool) else value
    if form == "shell":
        return key if value is True else "" if value is False else f"{key} {shown}"
    return f"{key}={shown}"


def form_of(path: Path) -> Form:
    """Return the form of a file by its ending. Raises PlanError for an unknown ending."""
    if path.suffix not in ENDINGS:
        raise PlanError(f"{path}: a file of options ends in one of {', '.join(ENDINGS)}")
    return ENDINGS[path.suffix]


def entries_of(path: Path, function: str = "") -> list[Entry]:
    """Return every option of a file. Raises PlanError of one line, with the file and the line."""
    form = form_of(path)
    try:
        # Before reading, since a mistyped name may be a checkpoint of many gigabytes.
        if path.stat().st_size > LARGEST_BYTES:
            raise PlanError(f"larger than {LARGEST_BYTES:,} bytes: no file of options")
        # utf-8-sig drops the byte order mark that some editors of Windows write.
        text = path.read_text(encoding="utf-8-sig")
        return read_python(text, function) if form == "python" else READERS[form](text)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is no text") from None
    # Parsers recurse for each level, and strangers' files may have any number of levels.
    except RecursionError:
        raise PlanError(f"{path} is nested too deeply") from None
    except PlanError as error:
        raise PlanError(f"{path}, {error}") from None


def file_texts(software: TrainingSoftware, plan: Plan) -> dict[str, str]:
    """Return the text of each file by name. Raises PlanError if the software lacks such a model."""
    facts, launch = software.all_facts(plan), software.launch(plan)
    cluster = plan.cluster
    machines = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
    title = f"{plan.model.name} on {machines}, {plan.recipe.global_batch} x {plan.recipe.sequence} tokens per step"
    configs = {
        file.name: text_of(file, facts, [f"{MARK} {software.word}: {file.title}.", title]) for file in software.files
    }
    heading = f"{MARK} {software.word}: {title}"
    scripts = {"launch.sh": launch_script(plan, launch, heading), "launch.sbatch": slurm_script(plan, launch, heading)}
    return configs | scripts


def write_files(software: TrainingSoftware, plan: Plan, folder: Path) -> list[Path]:
    """Write the files into a folder, which is created. Raises PlanError rather than replace somebody else's file."""
    files = file_texts(software, plan)
    # All files are checked before the first is written, so that no folder is replaced by half.
    for name in files:
        check_writable(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{folder} cannot be written: {error.strerror}") from None
    return [folder / name for name in files]


def check_writable(path: Path) -> None:
    """Raise PlanError if the path holds a file that meshwright did not write."""
    if not path.exists():
        return
    # JSON has no comments: such a file is recognized by the launch script beside it.
    marked = path.with_name("launch.sh") if path.suffix == ".json" else path
    if not marked.is_file() or MARK not in marked.read_text(encoding="utf-8", errors="replace"):
        raise PlanError(f"{path} would be replaced, and meshwright did not write it: take another folder")


def launch_script(plan: Plan, launch: LaunchCommand, title: str) -> str:
    """Return launch.sh, which is run on each node with the number of the node."""
    lines = [*node_head(plan, title, launch.yours), f'TORCHRUN="{TORCHRUN}"', *launch.before, launch.command, ""]
    return "\n".join(lines)


def node_head(plan: Plan, title: str, yours: Sequence[str] = ()) -> list[str]:
    """Return the first lines of launch.sh: the numbers of nodes and devices, and the place of this node."""
    cluster = plan.cluster
    many = cluster.nodes > 1
    usage = f"on each node: NODE_RANK=0..{cluster.nodes - 1} HEAD=name of node 0" if many else "on its node"
    return [
        "#!/usr/bin/env bash", f"# {title}", f"# Run {usage}: bash launch.sh", *_yours(yours), "set -euo pipefail",
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', f"NNODES={cluster.nodes}",
        f"GPUS={cluster.devices_per_node}",
        # Of several nodes the user must say which this is, else two nodes would both be the first.
        "NODE_RANK=${NODE_RANK:?number of this node}" if many else "NODE_RANK=${NODE_RANK:-0}",
        "HEAD=${HEAD:?name of node 0}" if many else "HEAD=${HEAD:-localhost}", f"PORT=${{PORT:-{PORT}}}",
    ]  # fmt: skip


def slurm_script(plan: Plan, launch: LaunchCommand, title: str) -> str:
    """Return launch.sbatch: one task per node, which runs launch.sh."""
    return "\n".join([*slurm_head(plan, title, launch.yours), *srun_lines(plan), ""])


def slurm_head(
    plan: Plan, title: str, yours: Sequence[str] = (), name: str = "meshwright-plan", directives: Sequence[str] = ()
) -> list[str]:
    """Return the first lines of a job: its directives, the name of node 0, and the folder of launch.sh."""
    cluster = plan.cluster
    gpus = [f"--gpus-per-node={cluster.devices_per_node}"] if cluster.device.is_gpu else []
    # Without --mem=0 a job that has its nodes alone may still get only a part of their memory.
    asked = [f"--job-name={name}", f"--nodes={cluster.nodes}", "--ntasks-per-node=1", *gpus, "--exclusive", "--mem=0"]
    return [
        "#!/usr/bin/env bash",
        # sbatch reads its directives up to the first command, so they stand at the top.
        *(f"#SBATCH {option}" for option in (*asked, *directives)),
        "# Yours, where the cluster asks for them. Delete one # to switch a line on:",
        "##SBATCH --partition=PARTITION", "##SBATCH --account=ACCOUNT", f"# {title}",
        "# Run in its folder, which all nodes see: sbatch launch.sbatch", *_yours(yours),
        "# Yours, where jobs do not get the environment of the shell that runs sbatch:",
        "# module load MODULE; . VENV/bin/activate", "set -euo pipefail",
        'export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        'HERE="${SLURM_SUBMIT_DIR:-$PWD}"',
        '[ -f "$HERE/launch.sh" ] || { echo "no launch.sh in $HERE: cd to its folder, then sbatch" >&2; exit 1; }',
    ]  # fmt: skip


def srun_lines(plan: Plan, ending: str = "--kill-on-bad-exit=1") -> list[str]:
    """Return the command that runs launch.sh on each node. `ending`: when srun ends the others after the first."""
    label = " --label" if plan.cluster.nodes > 1 else ""  # each line of the log begins with the number of its node
    return [
        # Slurm may bind the only task of a node to one core, and with it all processes that torchrun starts.
        f"srun --nodes={plan.cluster.nodes} --ntasks-per-node=1 --cpu-bind=none{label} {ending} bash -c \\",
        '    \'NODE_RANK=$SLURM_NODEID exec bash "$0/launch.sh"\' "$HERE"',
    ]


def _yours(yours: Sequence[str]) -> list[str]:
    return [f"# Yours to set: {', '.join(yours)}."] if yours else []
