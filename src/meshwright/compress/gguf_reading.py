"""Tokenizer and generation settings of an opened GGUF file."""

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.data import Tokenizer
from meshwright.data.corpus.corpus import lock, new_folder
from meshwright.formats.gguf.header import is_gguf
from meshwright.spec.errors import DataError, HubError
from meshwright.spec.user_cache import default_root

if TYPE_CHECKING:
    from meshwright.formats.gguf.model import GGUFModel


def gguf_tokenizer(model: "GGUFModel") -> Tokenizer | None:
    """Return the tokenizer of a GGUF file, or None if it has no supported one.

    Raises HubError when it is damaged or larger than the model's vocabulary.
    """
    vocabulary = model.vocabulary
    if vocabulary is None:
        return None
    try:
        templates = {"template": model.chat_template, "tool_template": model.tool_template}
        tokenizer = Tokenizer(vocabulary.text, bos=vocabulary.bos, eos=vocabulary.eos, **templates)
    except DataError as error:
        raise HubError(f"{model.path}: {error}") from error
    except Exception as error:  # the library raises bare Exception
        raise HubError(f"{model.path}: its tokenizer is damaged: {' '.join(str(error).split())}") from error
    if tokenizer.vocab > model.shape.vocab:
        raise HubError(f"{model.path}: its tokenizer has {tokenizer.vocab} tokens, its model {model.shape.vocab}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer) -> str:
    """Write a tokenizer.json into the user's cache and return its path."""
    folder = default_root() / "tokenizers" / f"gguf-{tokenizer.fingerprint}"
    with lock(folder):
        if not (folder / "tokenizer.json").is_file():
            with new_folder(folder) as new:
                tokenizer.save(new)
    return str(folder / "tokenizer.json")


def gguf_generation(model: "GGUFModel") -> dict[str, object] | None:
    """Return the end-of-text ids in the form of generation_config.json, or None."""
    ends = model.vocabulary.stop_ids if model.vocabulary else ()
    return {"eos_token_id": list(ends)} if ends else None


def is_gguf_path(path: Path) -> bool:
    """Return whether a path is a GGUF file or is named like one."""
    return path.suffix == ".gguf" or is_gguf(path)
