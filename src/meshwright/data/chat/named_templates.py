"""Chat template that `data.template` names: a format of spec/plan/plan.py, or a file."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Final

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError
from meshwright.spec.plan.plan import CHAT_FORMATS, EOS, ChatFormat

AUTO: Final = "auto"


def named_template(setting: str) -> str | None:
    """Return the text of `data.template`. None = auto. Raises DataError if it is neither a format nor a file."""
    if setting == AUTO:
        return None
    if setting in CHAT_FORMATS:
        shipped = resources.files("meshwright.data").joinpath("templates", CHAT_FORMATS[setting].file)
        return shipped.read_text(encoding="utf-8")
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(
            f"data.template={setting} cannot be read: {error.strerror}; take auto, the path of a Jinja file, or a "
            f"format: {', '.join(CHAT_FORMATS)}"
        ) from error
    except OSError as error:
        raise DataError(f"data.template={setting} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.template={setting} cannot be read: it is not UTF-8 text") from error


def check_format(setting: str, tokenizer: Tokenizer) -> None:
    """Raise DataError when `data.template` is a format whose tokens the vocabulary lacks, naming formats that fit.

    A model would otherwise learn to write these tokens letter by letter, and never to stop.
    """
    form = CHAT_FORMATS.get(setting)
    lacked = list(_lacked(form, tokenizer)) if form else []
    if lacked:
        fitting = [*fitting_formats(tokenizer), f"{AUTO} (the tokenizer's own template, else headings)"]
        raise DataError(
            f"data.template={setting} needs {' and '.join(lacked)}, which the tokenizer lacks as one special "
            f"token: take data.template={' or '.join(fitting)}"
        )


def fitting_formats(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the formats whose tokens the vocabulary has."""
    return [name for name, form in CHAT_FORMATS.items() if not any(_lacked(form, tokenizer))]


def _lacked(form: ChatFormat, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield tokens of a format that are not one id each. Its turn end must also be special."""
    yield from (token for token in form.tokens if len(tokenizer.encode(token, special=True)) != 1)
    if form.turn_end == EOS:
        yield from [] if tokenizer.spelled.get(EOS) else ["an end-of-text token"]
    else:
        ids = tokenizer.encode(form.turn_end, special=True).tolist()
        yield from [] if len(ids) == 1 and ids[0] in tokenizer.special_ids else [form.turn_end]
