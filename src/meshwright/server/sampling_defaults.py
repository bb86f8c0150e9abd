"""Sampling values of a generation_config.json for requests that do not state them, as vLLM uses them."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from meshwright.server.request_fields import AnswerFields

LENGTH: Final = "max_new_tokens"
_NAMES: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that a request could state (vLLM, `ModelConfig.get_diff_sampling_param`)."""
    defaults = {name: generation[name] for name in _NAMES if _is_valid(name, generation.get(name))}
    length = generation.get(LENGTH)
    return defaults | ({LENGTH: length} if type(length) is int and length > 0 else {})


def _is_valid(name: str, value: Any) -> bool:
    try:
        return value is not None and bool(AnswerFields.model_validate({name: value}))
    except ValidationError:
        return False


def with_defaults(body: Mapping[str, Any], sampling: Mapping[str, float]) -> dict[str, Any]:
    """Fill the defaults into a body, except for beams, which draw no tokens."""
    stated = {name: content for name, content in body.items() if content is not None}
    if stated.get("use_beam_search"):
        return stated
    return {name: default for name, default in sampling.items() if name != LENGTH} | stated
