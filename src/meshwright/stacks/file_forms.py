"""Text of a configuration file in its form: YAML, JSON, TOML, shell or Python."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import ConfigFile, Facts, Form
from meshwright.stacks.text import document_text, python_text, shell_text
from meshwright.stacks.text.option_text import Called, Entry, Setting

WRITERS: Mapping[Form, Callable[[Sequence[Setting], Sequence[str]], str]] = {
    "yaml": document_text.write_yaml, "json": document_text.write_json, "toml": document_text.write_toml,
    "shell": shell_text.write, "python": python_text.write,
}  # fmt: skip
READERS: Mapping[Form, Callable[[str], list[Entry]]] = {
    "yaml": document_text.read_yaml, "json": document_text.read_json, "toml": document_text.read_toml,
    "shell": shell_text.read, "python": python_text.read,
}  # fmt: skip
ENDINGS: Mapping[str, Form] = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".py": "python", ".sh": "shell",
    ".slurm": "shell",
    ".sbatch": "shell", ".bash": "shell", ".sub": "shell", ".args": "shell",
}  # fmt: skip
LARGEST_BYTES = 2**20


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
        if path.stat().st_size > LARGEST_BYTES:
            raise PlanError(f"larger than {LARGEST_BYTES:,} bytes: no file of options")
        text = path.read_text(encoding="utf-8-sig")
        return python_text.read(text, function) if form == "python" else READERS[form](text)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is no text") from None
    except RecursionError:
        raise PlanError(f"{path} is nested too deeply") from None
    except PlanError as error:
        raise PlanError(f"{path}, {error}") from None
