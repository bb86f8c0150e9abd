"""The config.json of a model on the Hugging Face Hub, from the cache or over the network."""

from pathlib import Path
from threading import Thread

from meshwright.spec import presets
from meshwright.spec.errors import ArgumentError, PlanError, argument
from meshwright.spec.hub_names import download_command, looks_like_hub_name

CONFIG = "config.json"
SECONDS = 2.0
"""Seconds for the hub to answer at all, unless HF_HUB_ETAG_TIMEOUT is set."""


def is_hub_name(model: str) -> bool:
    """Return if this is `ORG/NAME`, and neither an existing path nor a preset."""
    if not looks_like_hub_name(model) or Path(model).exists():
        return False
    try:
        presets.published(model)
    except PlanError:
        return True
    return False


def config_folder(name: str) -> Path:
    """Return a folder with the config.json of a model: the copy in the hub's cache, or else a download.

    Raises ArgumentError, with the command to run instead, without a copy and a network.
    """
    instead = f"where there is a network, run `{download_command(name, CONFIG)}`, and give {name.rpartition('/')[2]}"
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise ArgumentError(
            "model",
            name,
            "is no preset and no folder here, and huggingface_hub is not installed",
            f"run `pip install huggingface_hub`; or {instead}",
        ) from None
    # The cache first, which needs no network. Then one quick request, since a download retries for 23 seconds.
    cached = try_to_load_from_cache(name, CONFIG)
    if isinstance(cached, str):
        return Path(cached).parent
    absent = f"{argument('model', name)} is no preset, no folder here and not in the Hugging Face cache"
    if constants.HF_HUB_OFFLINE:
        raise ArgumentError(
            "model", name, sentence=f"{absent}, and HF_HUB_OFFLINE forbids downloads: unset it; or {instead}"
        )
    if not _hub_answers():
        raise ArgumentError("model", name, sentence=f"{absent}, and {constants.ENDPOINT} cannot be reached: {instead}")
    try:
        return Path(hf_hub_download(name, CONFIG)).parent
    except GatedRepoError:
        raise ArgumentError(
            "model", name, "is gated", f"accept its terms on {constants.ENDPOINT}/{name} and run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        near = presets.suggest(name.rpartition("/")[2].lower(), presets.model_names())
        raise ArgumentError("model", name, f"is not on the Hugging Face Hub; presets {near}") from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        raise ArgumentError(
            "model", name, sentence=f"{absent}, and {constants.ENDPOINT} did not send it: {instead}"
        ) from None


def _hub_answers() -> bool:
    """Return if the hub answers one request in time. `hf_hub_download` would try six times, 23 seconds in all."""
    from huggingface_hub import constants, get_session

    chosen = constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT
    seconds = float(constants.HF_HUB_ETAG_TIMEOUT) if chosen else SECONDS
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
