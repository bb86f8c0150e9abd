"""Models named as `ORG/NAME` or `ORG/NAME@REVISION`: from the Hugging Face cache, or downloaded into it."""

from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from meshwright.spec import presets
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.hub_cache import find_snapshot
from meshwright.spec.hub_names import download_command, looks_like_hub_name, split_revision

ANSWER_S = 2.0
"""Seconds for the hub to answer at all, unless HF_HUB_ETAG_TIMEOUT is set."""
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Files that a model is read from: weights, config, tokenizer, chat template. Other forms of weights stay there."""


def local_folder(path: str | Path) -> Path:
    """Return the folder of a model of the hub: the cached one, else a download. Any other path is returned as it is.

    So is a name that the hub cannot be asked about, which whoever opens it reports. Raises ArgumentError when the hub
    refuses.
    """
    name, folder = str(path), Path(path).expanduser()
    # A folder here comes first, and so does one whose parent is here: the name is then a misspelled path.
    if folder.exists() or Path(name.partition("/")[0]).is_dir() or not looks_like_hub_name(name):
        return Path(path)
    return find_snapshot(name) or (Path(path) if reason_not_to_ask() else fetch(name, MODEL_FILES))


def reason_not_to_ask() -> str:
    """Return why the hub cannot be asked. Empty = it answers."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return "huggingface_hub is not installed"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids downloads"
    return "" if hub_answers() else f"{constants.ENDPOINT} cannot be reached"


def fetch(name: str, files: Sequence[str], instead: str = "") -> Path:
    """Download files of a model into the cache and return their folder. Raises ArgumentError with the reason.

    `instead`: how else to get them.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = split_revision(name)
    instead = instead or f"where there is a network, run `{download_command(name)}`, and give {Path(repository).name}"
    try:
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(files), ignore_patterns="*/*")
        )
    except GatedRepoError:
        address = f"{constants.ENDPOINT}/{repository}"
        raise ArgumentError(
            "model", name, "is gated", f"accept its terms on {address} and run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ArgumentError("model", name, f"has no revision {revision}", f"see those of {repository}") from None
    except RepositoryNotFoundError:
        near = presets.suggest(Path(repository).name.lower(), presets.model_names())
        raise ArgumentError("model", name, f"is not on the Hugging Face Hub; presets {near}") from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        absent = f"{argument('model', name)} is no preset, no folder here and not in the Hugging Face cache"
        raise ArgumentError(
            "model", name, sentence=f"{absent}, and {constants.ENDPOINT} did not send it: {instead}"
        ) from None
    if len(files) > 1 and find_snapshot(name) is None:
        raise ArgumentError(
            "model", name, "has no config.json with safetensors weights beside it", "take a model that has them"
        )
    return folder


def hub_answers() -> bool:
    """Return if the hub answers one request in time. A download would try six times, 23 seconds in all."""
    from huggingface_hub import constants, get_session

    is_set = constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT
    seconds = float(constants.HF_HUB_ETAG_TIMEOUT) if is_set else ANSWER_S
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=seconds))
        except Exception:  # each version of huggingface_hub has another client with errors of its own
            return

    # No timeout of a client covers the search for an address, which a silent name server holds for up to a minute.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(answers)
