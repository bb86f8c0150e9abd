"""Sampling values of a generation_config.json, for what a request does not say, as vLLM takes them."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from meshwright.server.request_fields import AnswerFields

LENGTH: Final = "max_new_tokens"
_NAMES: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Those that a request could say; others are passed over. vLLM, `ModelConfig.get_diff_sampling_param`."""
    kept = {name: generation[name] for name in _NAMES if _may_be_asked(name, generation.get(name))}
    length = generation.get(LENGTH)
    return kept | ({LENGTH: length} if type(length) is int and length > 0 else {})


def _may_be_asked(name: str, value: Any) -> bool:
    try:
        return value is not None and bool(AnswerFields.model_validate({name: value}))
    except ValidationError:
        return False


def with_defaults(body: Mapping[str, Any], sampling: Mapping[str, float]) -> dict[str, Any]:
    """A body with what it does not say, but for beams, which draw no token."""
    given = {name: one for name, one in body.items() if one is not None}
    if given.get("use_beam_search"):
        return given
    return {name: default for name, default in sampling.items() if name != LENGTH} | given
