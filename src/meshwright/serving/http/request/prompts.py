"""Conversion of the fields of a request to tasks for the engine, within its limits."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.http.api_error import bad_request
from meshwright.serving.http.channel.model_card import ModelCard
from meshwright.serving.http.request.access import Tenant
from meshwright.serving.http.request.engine_task import EngineTask
from meshwright.serving.http.request.request_fields import LENGTH, AnswerFields, CompletionFields
from meshwright.serving.http.server_options import ServerLimits
from meshwright.spec.errors import MeshwrightError


def build_tasks(
    fields: AnswerFields,
    prompts: Sequence[list[int]],
    card: ModelCard,
    limits: ServerLimits,
    tenant: Tenant,
    schema: Mapping[str, Any] | None = None,
    adapter: str | None = None,
) -> list[EngineTask]:
    """Build a task for each prompt. Raises ApiError beyond a limit, or for an invalid request.

    Args:
        schema: Schema of the answers where the fields have none.
        adapter: Adapter that the model's name in the request means.
    """
    name, candidates = "n" if fields.candidates == fields.n else "best_of", fields.candidates
    if candidates > limits.max_n:
        raise bad_request(f"{name}={candidates} exceeds the limit of {limits.max_n} answers per request", name)
    if candidates > card.most_sequences:
        raise bad_request(f"{name}={candidates} exceeds the limit of {card.most_sequences} answers at once", name)
    most = [_max_answer_tokens(fields, len(ids), card, limits, len(prompts)) for ids in prompts]
    if sum(most) * candidates > limits.max_answer_tokens:
        raise bad_request(
            f"{sum(most) * candidates:,} new tokens (prompts x n x max_tokens) exceed the limit of a request, "
            f"{limits.max_answer_tokens:,}: ask for fewer",
            "max_tokens",
        )
    scored = fields.likeliest if isinstance(fields, CompletionFields) and fields.echo else None
    with_logprobs = fields.likeliest is not None or candidates > fields.n
    model_ends = frozenset() if fields.ignore_eos else frozenset(card.end_ids)
    # A stop string that is a special token ends the answer by its id: its text is left out of answers by default.
    spelled = [card.tokenizer.special_id(stop) for stop in fields.stops] if card.tokenizer else []
    stop_ids = frozenset([*fields.stop_token_ids, *(token for token in spelled if token is not None)])
    return [
        EngineTask(
            prompt=list(ids),
            options=_request_options(fields, tokens, tenant, schema, adapter, stop_ids),
            tokenizer=card.tokenizer,
            end_ids=model_ends | stop_ids,
            scored=scored,
            with_logprobs=with_logprobs,
            keeps_ids=with_logprobs or fields.return_token_ids,
            with_special=fields.with_special,
        )
        for ids, tokens in zip(prompts, most, strict=True)
    ]


def _max_answer_tokens(
    fields: AnswerFields, prompt: int, card: ModelCard, limits: ServerLimits, prompts: int
) -> int:  # fmt: skip
    """Return the most tokens of an answer: as requested, or as many as fit. Raises ApiError if too few fit."""
    longest = card.longest
    if not prompt:
        raise bad_request("the prompt is empty: give at least one token", "prompt")
    if prompt > min(longest, limits.max_prompt_tokens or longest):
        most = min(longest, limits.max_prompt_tokens or longest)
        raise bad_request(
            f"the prompt has {prompt:,} tokens and may have {most:,}: shorten it", code="context_length_exceeded"
        )
    room = longest - prompt + 1
    if fields.max_new_tokens is None:
        room = min(room, int(card.sampling.get(LENGTH, room)))
        return min(room, limits.max_answer_tokens // (fields.candidates * prompts))
    if fields.max_new_tokens > room:
        raise bad_request(
            f"max_tokens={fields.max_new_tokens:,} and the prompt's {prompt:,} tokens exceed the context of "
            f"{longest:,}: ask for fewer",
            "max_tokens", "context_length_exceeded",
        )  # fmt: skip
    return fields.max_new_tokens


def _request_options(
    fields: AnswerFields, tokens: int, tenant: Tenant, schema: Mapping[str, Any] | None, adapter: str | None,
    stop_ids: Collection[int],
) -> RequestOptions:  # fmt: skip
    """Return the options for the engine. A request without a seed gets a random one."""
    try:
        return RequestOptions(
            max_new_tokens=tokens,
            temperature=0.0 if fields.use_beam_search else fields.temperature,
            top_k=max(0, fields.top_k),
            top_p=fields.top_p,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logit_bias=fields.biases,
            seed=secrets.randbits(62) if fields.seed is None else fields.seed,
            n=fields.answers,
            beams=fields.beams,
            length_penalty=fields.length_penalty,
            early_stopping=fields.early_stopping,
            stop=fields.stops,
            stop_ids=tuple(stop_ids),
            ignore_end=fields.ignore_eos,
            json_schema=fields.answer_schema if schema is None else schema,
            regex=fields.answer_regex,
            logprobs=fields.likeliest or 0,
            priority=fields.priority,
            adapter=adapter,
            # The salt keeps the prefixes of tenants apart in the cache.
            salt=f"{tenant.salt}\0{fields.cache_salt}",
        )
    except MeshwrightError as error:
        raise bad_request(str(error)) from None
