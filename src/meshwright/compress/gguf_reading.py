"""What an opened GGUF file gives beside weights: its tokenizer as an object, and as a file where one is asked for."""

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.data import Tokenizer
from meshwright.data.cache_folder import lock, new_folder
from meshwright.model.gguf.gguf_header import is_gguf
from meshwright.spec.errors import DataError, HubError
from meshwright.spec.user_cache import default_root

if TYPE_CHECKING:
    from meshwright.model.gguf.gguf_model import GGUFModel


def gguf_tokenizer(found: "GGUFModel") -> Tokenizer | None:
    """None where the file has none that is read here. HubError where it is damaged, or larger than the model."""
    if found.vocabulary is None:
        return None
    one = found.vocabulary
    try:
        templates = {"template": found.chat_template, "tool_template": found.tool_template}
        tokenizer = Tokenizer(one.text, bos=one.bos, eos=one.eos, **templates)
    except DataError as error:
        raise HubError(f"{found.path}: {error}") from error
    except Exception as error:  # the library raises bare Exception
        raise HubError(f"{found.path}: its tokenizer is damaged: {' '.join(str(error).split())}") from error
    if tokenizer.vocab > found.shape.vocab:
        raise HubError(f"{found.path}: its tokenizer has {tokenizer.vocab} tokens, its model {found.shape.vocab}")
    return tokenizer


def kept_tokenizer(tokenizer: Tokenizer) -> str:
    """A tokenizer.json of it in the user's cache, for what reads text with a file's name."""
    folder = default_root() / "tokenizers" / f"gguf-{tokenizer.fingerprint}"
    with lock(folder):
        if not (folder / "tokenizer.json").is_file():
            with new_folder(folder) as new:
                tokenizer.save(new)
    return str(folder / "tokenizer.json")


def gguf_generation(found: "GGUFModel") -> dict[str, object] | None:
    """As a generation config has it: the tokens that end a text."""
    ends = found.vocabulary.stop_ids if found.vocabulary else ()
    return {"eos_token_id": list(ends)} if ends else None


def is_gguf_path(path: Path) -> bool:
    """Whether a path is a GGUF file, or is meant to be one."""
    return path.suffix == ".gguf" or is_gguf(path)
