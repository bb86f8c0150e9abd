"""The routes: each reads a body, lets the engine answer, and writes a document."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from meshwright.data.chat_prompt import template_of
from meshwright.serve.answer_text import opened_thought
from meshwright.server.access import Tenant
from meshwright.server.answer_document import AnswerDocument
from meshwright.server.answering import Admission, Answering, ClientGone
from meshwright.server.api_error import ApiError, mistake, refused, shutting_down
from meshwright.server.chat_fields import ChatFields, TokenizeFields
from meshwright.server.chat_shape import ChatShape
from meshwright.server.checked_fields import checked_fields
from meshwright.server.completion_shape import CompletionShape, EchoedPrompt
from meshwright.server.engine_link import EngineLink
from meshwright.server.engine_task import EngineTask
from meshwright.server.event_stream import send_events, watched, whole
from meshwright.server.model_card import ModelCard
from meshwright.server.prompt_reader import PromptReader
from meshwright.server.prompts import tasks_of
from meshwright.server.request_body import ClientDisconnect, read_body
from meshwright.server.request_fields import AnswerFields, CompletionFields, DetokenizeFields
from meshwright.server.request_log import RequestRecord, Write
from meshwright.server.sampling_defaults import with_defaults
from meshwright.server.server_metrics import ServerMetrics
from meshwright.server.server_options import ServerOptions
from meshwright.server.tool_use import tool_use
from meshwright.spec.errors import printable

CLIENT_GONE = 499
"""In the log, for a request whose client left."""
THOUGHT_TOKENS = 8
"""At the end of a prompt: a mark that opens a thought, spelled in letters, and blanks behind it."""
LONGEST_PATH = 200
"""Characters of a requested path that the log shows."""


class Service:
    """What the routes share: the engine, who is let in, and the log."""

    def __init__(
        self, engine: EngineLink, admission: Admission, metrics: ServerMetrics, options: ServerOptions, write: Write
    ) -> None:
        self.engine, self.admission, self.metrics, self.write = engine, admission, metrics, write
        self.limits, self.loads_adapters = options.limits, options.adapter_folder is not None
        metrics.watch_open(lambda: admission.open)
        self.loading = asyncio.Lock()
        """Held while an adapter is loaded or unloaded over HTTP."""
        self.reader: PromptReader | None = None
        """Opened with the model; None = it has no tokenizer."""

    @property
    def health(self) -> str:
        """`ok`, or why nothing is answered."""
        if self.admission.closed:
            return "draining"
        if self.engine.state != "ready":
            return self.engine.state
        return "stuck" if self.engine.stuck(self.limits.step_seconds) else "ok"

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call for: the model, and adapters that are loaded now."""
        card = self.engine.card
        return () if card is None else (card.name, *self.engine.adapters)

    def card(self, name: str | None = None) -> ModelCard:
        """The model, if it or one of its adapters has that name. ApiError."""
        if self.admission.closed:
            raise shutting_down()
        card = self.engine.card
        if self.engine.state != "ready" or card is None:
            state = "the model is being loaded" if self.engine.state == "loading" else "the engine has failed"
            raise ApiError(503, f"{state}: ask again later", code="not_ready", retry_seconds=5)
        if name is not None and name not in self.names:
            message = f"the model {printable(name)[:100]} is not here: take {' or '.join(self.names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return card

    def text_reader(self) -> PromptReader:
        """ApiError where the model has no tokenizer."""
        if self.reader is None:
            raise refused("the model has no tokenizer: give the prompt as token ids", "prompt")
        return self.reader


class Endpoint:
    """A route that is let in, logged, and answers mistakes in the form of the interface."""

    def __init__(self, service: Service, answer: "Answer") -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        service = self._service
        tenant: Tenant = scope["state"]["tenant"]
        path = printable(scope["path"])[:LONGEST_PATH]
        record = RequestRecord(tenant=tenant.name, route=f"{scope['method']} {path}")
        call = Call(service, Request(scope, receive), send, tenant, record)
        try:
            with service.admission.request_of(tenant):
                answer = await self._answer(call)
            if answer is not None:
                await answer(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            record.status, record.reason = CLIENT_GONE, "the client left"
        except ApiError as error:
            await self._refuse(error, scope, receive, send, record)
        except Exception:
            traceback.print_exc()
            await self._refuse(mistake(), scope, receive, send, record)
        finally:
            service.write(record.line)

    async def _refuse(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:  # fmt: skip
        self._service.metrics.refusals.inc()
        record.status, record.reason = error.status, error.code
        await JSONResponse(error.document, error.status, error.headers)(scope, receive, send)


class Call:
    """One request to an endpoint."""

    def __init__(
        self, service: Service, request: Request, send: Send, tenant: Tenant, record: RequestRecord
    ) -> None:  # fmt: skip
        self.service, self.request, self.send, self.tenant, self.record = service, request, send, tenant, record

    async def body(self) -> Any:
        """ApiError, ClientDisconnect."""
        return await read_body(self.request, self.service.limits)

    async def body_with_defaults(self) -> Any:
        """A body with the model's own sampling values where it says none. ApiError, ClientDisconnect."""
        body, card = await self.body(), self.service.engine.card
        return body if card is None else with_defaults(body, card.sampling)


Answer = Callable[[Call], Awaitable[Response | None]]
"""Answers one request; None = it has sent the answer itself."""


async def completions(call: Call) -> Response | None:
    """`POST /v1/completions`."""
    fields = checked_fields(CompletionFields, await call.body_with_defaults())
    card = call.service.card(fields.model)
    given = fields.prompts
    if len(given) > call.service.limits.max_prompts:
        raise refused(
            f"{len(given)} prompts are more than the {call.service.limits.max_prompts} of a request", "prompt"
        )
    if fields.stops and card.tokenizer is None:
        raise refused("stop needs a tokenizer, and the model has none: give stop_token_ids", "stop")
    ids = [one if isinstance(one, list) else await call.service.text_reader().text(one) for one in given]
    decode = card.tokenizer.decode if card.tokenizer else lambda _: ""

    def shape(tasks: list[EngineTask]) -> CompletionShape:
        pairs = zip(given, tasks, strict=True) if fields.echo else ()
        echoed = [EchoedPrompt(one if isinstance(one, str) else decode(one), task) for one, task in pairs]
        return CompletionShape(
            card.tokenizer, fields.likeliest, echoed, fields.answers, with_special=fields.with_special
        )

    return await _answered(call, fields, card, ids, shape)


async def chat_completions(call: Call) -> Response | None:
    """`POST /v1/chat/completions`."""
    fields = checked_fields(ChatFields, await call.body_with_defaults())
    card = call.service.card(fields.model)
    reader, rows = call.service.text_reader(), [message.row for message in fields.messages]
    use = tool_use(fields, template_of(card.tokenizer)) if card.tokenizer else None
    forced = use.forced if use else None
    begun, settings = forced.prefix if forced else "", fields.chat_template_kwargs
    ids = await reader.chat(rows, use.tools if use else None, begun, settings)
    if use is not None and card.tokenizer is not None:
        use = replace(use, thought=opened_thought(card.tokenizer.decode(ids[-THOUGHT_TOKENS:])))
    shape = ChatShape(card.tokenizer, fields.likeliest, use)
    return await _answered(call, fields, card, [ids], lambda _: shape, forced.json_schema if forced else None)


async def tokenize(call: Call) -> Response:
    """`POST /tokenize`: the tokens of a prompt as a completion or a chat would have them."""
    fields = checked_fields(TokenizeFields, await call.body())
    card = call.service.card(fields.model)
    reader = call.service.text_reader()
    if (fields.prompt is None) == (fields.messages is None):
        raise refused("give either prompt or messages", "prompt")
    ids = await (reader.text(fields.prompt) if fields.prompt is not None else _chat_ids(reader, fields))
    return JSONResponse({"count": len(ids), "max_model_len": card.longest, "tokens": ids})


async def detokenize(call: Call) -> Response:
    """`POST /detokenize`: the text of tokens."""
    fields = checked_fields(DetokenizeFields, await call.body())
    card = call.service.card(fields.model)
    if card.tokenizer is None:
        raise refused("the model has no tokenizer", "tokens")
    outside = next((token for token in fields.tokens if token >= card.tokenizer.vocab), None)
    if outside is not None:
        raise refused(f"token {outside} is outside the vocabulary of {card.tokenizer.vocab}", "tokens")
    return JSONResponse({"prompt": card.tokenizer.decode(fields.tokens)})


async def models(call: Call) -> Response:
    """`GET /v1/models` and `GET /v1/models/NAME`."""
    name = call.request.path_params.get("name")
    card = call.service.card(name)
    shared = {"object": "model", "created": card.created, "owned_by": "meshwright", "max_model_len": card.longest}
    names = call.service.names if name is None else (name,)
    every = [
        {"id": one, **shared, **({} if card.adapter_of(one) is None else {"parent": card.name})} for one in names
    ]  # fmt: skip
    return JSONResponse(every[0] if name is not None else {"object": "list", "data": every})


async def _chat_ids(reader: PromptReader, fields: TokenizeFields) -> list[int]:
    rows = [message.row for message in fields.messages or ()]
    return await reader.chat(rows, settings=fields.chat_template_kwargs)


async def _answered(
    call: Call,
    fields: AnswerFields,
    card: ModelCard,
    prompts: list[list[int]],
    shape: Callable[[list[EngineTask]], CompletionShape | ChatShape],
    schema: Mapping[str, Any] | None = None,
) -> Response | None:
    """Let the engine answer, as a stream or whole. `schema`: that the answer must keep to, beside what fields say."""
    service, record = call.service, call.record
    adapter = card.adapter_of(fields.model)
    tasks = tasks_of(fields, prompts, card, service.limits, call.tenant, schema, adapter)
    usage = fields.stream_options is not None and fields.stream_options.include_usage
    document = AnswerDocument(
        shape(tasks), adapter or card.name, best=fields.n, include_usage=usage, ids=fields.return_token_ids,
        logprobs=fields.likeliest is not None,
    )  # fmt: skip
    record.tasks, record.id, record.user = tasks, document.id, fields.user
    for task in tasks:
        task.arrived = record.arrived  # the prompt was waited for, too
    left = service.limits.max_request_seconds - (monotonic() - record.arrived)
    answering = Answering(service.engine, tasks, left)
    with service.admission.answering(answering), watched(answering, call.request.receive):
        if not fields.stream:
            await whole(answering)
            return JSONResponse(document.whole(answering))
        failure = await send_events(answering, document, call.request.scope, call.send)
        if failure is not None:
            record.status, record.reason = failure.status, failure.code
    return None
