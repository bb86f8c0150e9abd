"""The body of a request against the fields that it may have: nothing is converted, nothing unknown is passed over."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.server.api_error import ApiError, refused
from meshwright.spec.errors import printable
from meshwright.spec.presets import suggested

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (), "function_call": ("none",), "functions": ([],), "logit_processors": (), "metadata": ({},),
    "min_tokens": (0,), "modalities": (["text"],), "parallel_tool_calls": (True,), "prediction": (),
    "prompt_cache_key": (), "prompt_cache_retention": (), "reasoning_effort": (), "safety_identifier": (),
    "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",), "tool_choice": ("none",), "tools": ([],),
    "verbosity": (), "web_search_options": (), "prompt_logprobs": (),
    "chat_template_kwargs": ({},), "chat_template": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "moderation": (), "truncate_prompt_tokens": (), "mm_processor_kwargs": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
"""Fields of OpenAI's and vLLM's interfaces that this server has not -> values that ask for nothing."""


class CheckedFields(BaseModel):
    """A body, or a part of one. Nothing is converted, and nothing unknown is passed over."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    def check_together(self) -> None:
        """ApiError where fields contradict each other."""


Fields = TypeVar("Fields", bound=CheckedFields)


def checked_fields(kind: type[Fields], body: Mapping[str, Any]) -> Fields:
    """A body as fields; ApiError names the first one at fault. A field that is null is as one that is not there."""
    known, given = kind.model_fields, {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            given[name] = _without_nulls(value)
        elif name not in NEUTRAL:
            close = f"; {suggested(name, known, 1)}"
            raise refused(f"{printable(name)[:60]} is not known{close}", printable(name)[:60], "unknown_parameter")
        elif not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
            raise refused(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    try:
        found = kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from None
    found.check_together()
    return found


def _without_nulls(value: Any) -> Any:
    """A message, or options of a stream, without what is null: clients send back all fields of an answer."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return (
        [_without_nulls(one) if isinstance(one, dict) else one for one in value] if isinstance(value, list) else value
    )


def _explained(error: ValidationError) -> ApiError:
    """The first fault; of a field that takes several types the one that went furthest."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    name = str(faults[0]["loc"][0]) if faults[0]["loc"] else ""
    first = max((fault for fault in faults if str(fault["loc"][:1]) == str(faults[0]["loc"][:1])), key=_depth)
    place = ".".join(str(step) for step in first["loc"] if not (isinstance(step, str) and not step.isidentifier()))
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return refused(f"{name} is missing", name, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return refused(f"{printable(place)[:80]} is not known", name, "unknown_parameter")
    return refused(f"{printable(place)[:80]}: {first['msg'][:1].lower()}{first['msg'][1:]}", name)


def _depth(fault: Any) -> int:
    return len(fault["loc"])
