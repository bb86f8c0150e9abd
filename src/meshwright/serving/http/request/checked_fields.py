"""Validation of request bodies: nothing is converted, and unknown fields are refused."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.serving.http.api_error import ApiError, bad_request
from meshwright.spec.errors import printable
from meshwright.spec.presets import suggest

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
"""Fields of OpenAI's and vLLM's interfaces that this server lacks -> values that ask for nothing."""


class CheckedFields(BaseModel):
    """Body of a request, or a part of one. Nothing is converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    def check_together(self) -> None:
        """Raise ApiError if fields contradict each other."""


Fields = TypeVar("Fields", bound=CheckedFields)


def checked_fields(kind: type[Fields], body: Mapping[str, Any]) -> Fields:
    """Return a body as fields. A null field counts as absent. Raises ApiError for the first field at fault."""
    known, present = kind.model_fields, {}
    for name, content in body.items():
        if content is None:
            continue
        if name in known:
            present[name] = _without_nulls(content)
        elif name not in NEUTRAL:
            close = f"; {suggest(name, known, 1)}"
            raise bad_request(f"{printable(name)[:60]} is not known{close}", printable(name)[:60], "unknown_parameter")
        elif not any(content == neutral and type(content) is type(neutral) for neutral in NEUTRAL[name]):
            raise bad_request(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    try:
        fields = kind.model_validate(present)
    except ValidationError as error:
        raise _first_fault(error) from None
    fields.check_together()
    return fields


def _without_nulls(content: Any) -> Any:
    """Drop nulls inside messages and stream options, since clients send back all fields of an answer."""
    if isinstance(content, dict):
        return {name: inner for name, inner in content.items() if inner is not None}
    return (
        [_without_nulls(inner) if isinstance(inner, dict) else inner for inner in content]
        if isinstance(content, list)
        else content
    )


def _first_fault(error: ValidationError) -> ApiError:
    """Return the error for the first fault. Of a field with several types, the deepest fault counts."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    name = str(faults[0]["loc"][0]) if faults[0]["loc"] else ""
    first = max(
        (fault for fault in faults if str(fault["loc"][:1]) == str(faults[0]["loc"][:1])),
        key=lambda fault: len(fault["loc"]),
    )
    path = ".".join(str(step) for step in first["loc"] if not (isinstance(step, str) and not step.isidentifier()))
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{name} is missing", name, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{printable(path)[:80]} is not known", name, "unknown_parameter")
    return bad_request(f"{printable(path)[:80]}: {first['msg'][:1].lower()}{first['msg'][1:]}", name)
