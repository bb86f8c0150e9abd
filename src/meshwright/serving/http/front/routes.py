"""Routes: each reads a body, lets the engine answer, writes a document, and logs a line without text of requests."""

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from meshwright.data.chat.rendering import template_of
from meshwright.serving.engine.answers.tool_calls import find_open_thought
from meshwright.serving.http.channel import ApiError, ModelCard, bad_request, internal_error, shutdown_error
from meshwright.serving.http.front.answer_documents import AnswerDocument, ChatShape, CompletionShape, EchoedPrompt
from meshwright.serving.http.front.event_stream import send_events, wait_for_all, watch_client
from meshwright.serving.http.request.answering import Admission, Answering, ClientGone
from meshwright.serving.http.request.engine_link import EngineLink, ServerMetrics
from meshwright.serving.http.request.engine_task import EngineTask, build_tasks
from meshwright.serving.http.request.prompt_reader import PromptReader
from meshwright.serving.http.request.request_fields import (
    AnswerFields,
    ChatFields,
    CheckedFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
    check_fields,
    tool_use,
    with_defaults,
)
from meshwright.serving.http.server_options import ServerLimits, ServerOptions, Tenant
from meshwright.spec.errors import printable

Write = Callable[[str], None]
LONGEST_USER = 40


def to_stderr(line: str) -> None:
    """Print a line of the log."""
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Facts about a request, logged when it has ended."""

    tenant: str
    route: str
    user: str = ""
    id: str = "-"
    status: int = 200
    reason: str = ""
    """Reason for an early end."""
    tasks: list[EngineTask] = field(default_factory=list)
    arrived: float = field(default_factory=monotonic)

    @property
    def line(self) -> str:
        """Fields as NAME=VALUE, so programs can read them too."""
        now = monotonic()
        words = [time.strftime("%H:%M:%S"), self.route, str(self.status), f"{now - self.arrived:.3f} s", self.tenant]
        if self.tasks:
            cached, new = sum(task.cached for task in self.tasks), sum(task.tokens for task in self.tasks)
            words.append(f"prompt={sum(len(task.prompt) for task in self.tasks)} cached={cached} new={new}")
        first_tokens = [task.first_token_at for task in self.tasks if task.first_token_at is not None]
        words += [f"first={min(first_tokens) - self.arrived:.3f}s"] if first_tokens else []
        words += [self.id] if self.id != "-" else []
        words += [f"user={printable(self.user)[:LONGEST_USER]}"] if self.user else []
        words += [self.reason] if self.reason else []
        return " ".join(words)


CLIENT_GONE = 499
"""Status in the log for a request whose client left."""
THOUGHT_TOKENS = 8
"""Last tokens of a prompt that may hold a mark that opens a thought: its letters, and blanks after it."""
LONGEST_PATH = 200
"""Characters of a requested path in the log."""
AdapterName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


class Service:
    """State that the routes share: the engine, admission, and the log."""

    def __init__(
        self, engine: EngineLink, admission: Admission, metrics: ServerMetrics, options: ServerOptions, write: Write
    ) -> None:
        self.engine, self.admission, self.metrics, self.write = engine, admission, metrics, write
        self.limits, self.loads_adapters = options.limits, options.adapter_folder is not None
        metrics.watch_open(lambda: admission.open)
        self.loading = asyncio.Lock()
        """Held while an adapter is loaded or unloaded over HTTP."""
        self.reader: PromptReader | None = None
        """Prompt reader, opened with the model. None = it has no tokenizer."""

    @property
    def health(self) -> str:
        """`ok`, or why nothing is answered."""
        if self.admission.closed:
            return "draining"
        if self.engine.state != "ready":
            return self.engine.state
        return "stuck" if self.engine.is_stuck(self.limits.step_seconds) else "ok"

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a request may give: the model, and the adapters that are loaded now."""
        card = self.engine.card
        return () if card is None else (card.name, *self.engine.adapters)

    def card(self, name: str | None = None) -> ModelCard:
        """Return the card of the model, if it or one of its adapters has that name. Raises ApiError."""
        if self.admission.closed:
            raise shutdown_error()
        card = self.engine.card
        if self.engine.state != "ready" or card is None:
            state = "the model is being loaded" if self.engine.state == "loading" else "the engine has failed"
            raise ApiError(503, f"{state}: ask again later", code="not_ready", retry_seconds=5)
        if name is not None and name not in self.names:
            message = f"the model {printable(name)[:100]} is not here: take {' or '.join(self.names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return card

    def text_reader(self) -> PromptReader:
        """Return the prompt reader. Raises ApiError when the model has no tokenizer."""
        if self.reader is None:
            raise bad_request("the model has no tokenizer: give the prompt as token ids", "prompt")
        return self.reader


class Endpoint:
    """Route with admission, log, and errors in the form of the interface."""

    def __init__(self, service: Service, answer: "Answer") -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        service = self._service
        tenant: Tenant = scope["state"]["tenant"]
        path = printable(scope["path"])[:LONGEST_PATH]
        record = RequestRecord(tenant=tenant.name, route=f"{scope['method']} {path}")
        call = Call(service, Request(scope, receive), send, tenant, record)
        try:
            with service.admission.admit(tenant):
                answer = await self._answer(call)
            if answer is not None:
                await answer(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            record.status, record.reason = CLIENT_GONE, "the client left"
        except ApiError as error:
            await self._send_error(error, scope, receive, send, record)
        except Exception:
            traceback.print_exc()
            await self._send_error(internal_error(), scope, receive, send, record)
        finally:
            service.write(record.line)

    async def _send_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:  # fmt: skip
        self._service.metrics.refusals.inc()
        record.status, record.reason = error.status, error.code
        await JSONResponse(error.document, error.status, error.headers)(scope, receive, send)


class Call:
    """Request to an endpoint."""

    def __init__(self, service: Service, request: Request, send: Send, tenant: Tenant, record: RequestRecord) -> None:
        self.service, self.request, self.send, self.tenant, self.record = service, request, send, tenant, record

    async def body(self) -> Any:
        """Read the body. Raises ApiError, ClientDisconnect."""
        return await read_body(self.request, self.service.limits)

    async def body_with_defaults(self) -> Any:
        """Read the body and fill in the model's sampling defaults. Raises ApiError, ClientDisconnect."""
        body, card = await self.body(), self.service.engine.card
        return body if card is None else with_defaults(body, card.sampling)


async def read_body(request: Request, limits: ServerLimits) -> Mapping[str, Any]:
    """Read the body as a JSON object, within limits of size and time. Raises ApiError, ClientDisconnect."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, "content-encoding is not supported: send the body as it is", code="unsupported_encoding")
    _check_body_size(request.headers.get("content-length", "0"), limits)
    try:
        async with asyncio.timeout(limits.read_seconds):
            data = await _receive(request, limits)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limits.read_seconds:g} s", code="request_timeout") from None
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return body


async def _receive(request: Request, limits: ServerLimits) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        _check_body_size(size, limits)
        parts.append(part)
    return b"".join(parts)


def _check_body_size(size: int | str, limits: ServerLimits) -> None:
    if isinstance(size, str):
        size = int(size) if size.isdecimal() and len(size) < 19 else limits.max_body_bytes + 1
    if size > limits.max_body_bytes:
        raise ApiError(413, f"the body has more than {limits.max_body_bytes:,} bytes: send less", code="body_too_large")


Answer = Callable[[Call], Awaitable[Response | None]]
"""Handler of one request. None = it has sent the answer itself."""


async def completions(call: Call) -> Response | None:
    """Handle `POST /v1/completions`."""
    fields = check_fields(CompletionFields, await call.body_with_defaults())
    card = call.service.card(fields.model)
    prompts = fields.prompts
    if len(prompts) > call.service.limits.max_prompts:
        raise bad_request(
            f"{len(prompts)} prompts exceed the limit of {call.service.limits.max_prompts} per request", "prompt"
        )
    if fields.stops and card.tokenizer is None:
        raise bad_request("stop needs a tokenizer, and the model has none: give stop_token_ids", "stop")
    ids = [prompt if isinstance(prompt, list) else await call.service.text_reader().text(prompt) for prompt in prompts]
    # A prompt of ids is echoed as text.
    decode = card.tokenizer.decode if card.tokenizer else lambda _: ""

    def shape(tasks: list[EngineTask]) -> CompletionShape:
        pairs = zip(prompts, tasks, strict=True) if fields.echo else ()
        echoed = [EchoedPrompt(prompt if isinstance(prompt, str) else decode(prompt), task) for prompt, task in pairs]
        return CompletionShape(
            card.tokenizer, fields.likeliest, echoed, fields.answers, with_special=fields.with_special
        )

    return await _run_engine(call, fields, card, ids, shape)


async def chat_completions(call: Call) -> Response | None:
    """Handle `POST /v1/chat/completions`."""
    fields = check_fields(ChatFields, await call.body_with_defaults())
    card = call.service.card(fields.model)
    reader, rows = call.service.text_reader(), [message.row for message in fields.messages]
    use = tool_use(fields, template_of(card.tokenizer)) if card.tokenizer else None
    forced = use.forced if use else None
    answer_start, settings = forced.prefix if forced else "", fields.chat_template_kwargs
    ids = await reader.chat(rows, use.tools if use else None, answer_start, settings)
    if use is not None and card.tokenizer is not None:
        use = replace(use, thought=find_open_thought(card.tokenizer.decode(ids[-THOUGHT_TOKENS:])))
    shape = ChatShape(card.tokenizer, fields.likeliest, use)
    return await _run_engine(call, fields, card, [ids], lambda _: shape, forced.json_schema if forced else None)


async def tokenize(call: Call) -> Response:
    """Handle `POST /tokenize`: the tokens of a prompt as a completion or a chat would have them."""
    fields = check_fields(TokenizeFields, await call.body())
    card = call.service.card(fields.model)
    reader = call.service.text_reader()
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    ids = await (reader.text(fields.prompt) if fields.prompt is not None else _chat_ids(reader, fields))
    return JSONResponse({"count": len(ids), "max_model_len": card.longest, "tokens": ids})


async def detokenize(call: Call) -> Response:
    """Handle `POST /detokenize`: the text of tokens."""
    fields = check_fields(DetokenizeFields, await call.body())
    card = call.service.card(fields.model)
    if card.tokenizer is None:
        raise bad_request("the model has no tokenizer", "tokens")
    outside = next((token for token in fields.tokens if token >= card.tokenizer.vocab), None)
    if outside is not None:
        raise bad_request(f"token {outside} is outside the vocabulary of {card.tokenizer.vocab}", "tokens")
    return JSONResponse({"prompt": card.tokenizer.decode(fields.tokens)})


async def models(call: Call) -> Response:
    """Handle `GET /v1/models` and `GET /v1/models/NAME`."""
    name = call.request.path_params.get("name")
    card = call.service.card(name)
    shared = {"object": "model", "created": card.created, "owned_by": "meshwright", "max_model_len": card.longest}
    names = call.service.names if name is None else (name,)
    entries = [
        {"id": model_name, **shared, **({} if card.adapter_of(model_name) is None else {"parent": card.name})}
        for model_name in names
    ]
    return JSONResponse(entries[0] if name is not None else {"object": "list", "data": entries})


async def _chat_ids(reader: PromptReader, fields: TokenizeFields) -> list[int]:
    rows = [message.row for message in fields.messages or ()]
    return await reader.chat(rows, settings=fields.chat_template_kwargs)


async def _run_engine(
    call: Call,
    fields: AnswerFields,
    card: ModelCard,
    prompts: list[list[int]],
    shape: Callable[[list[EngineTask]], CompletionShape | ChatShape],
    schema: Mapping[str, Any] | None = None,
) -> Response | None:
    """Let the engine answer, as a stream or complete. `schema` is enforced in addition to the forms in the fields."""
    service, record = call.service, call.record
    adapter = card.adapter_of(fields.model)
    tasks = build_tasks(fields, prompts, card, service.limits, call.tenant, schema, adapter)
    usage = fields.stream_options is not None and fields.stream_options.include_usage
    document = AnswerDocument(
        shape(tasks), adapter or card.name, best=fields.n, include_usage=usage, ids=fields.return_token_ids,
        logprobs=fields.likeliest is not None,
    )  # fmt: skip
    record.tasks, record.id, record.user = tasks, document.id, fields.user
    for task in tasks:
        task.arrived = record.arrived  # waiting for the prompt counts too
    left = service.limits.max_request_seconds - (monotonic() - record.arrived)
    answering = Answering(service.engine, tasks, left)
    with service.admission.run(answering), watch_client(answering, call.request.receive):
        if not fields.stream:
            await wait_for_all(answering)
            return JSONResponse(document.whole(answering))
        failure = await send_events(answering, document, call.request.scope, call.send)
        if failure is not None:
            record.status, record.reason = failure.status, failure.code
    return None


class LoadFields(CheckedFields):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: AdapterName
    """Name for requests."""
    lora_path: str = Field(min_length=1, max_length=4096)
    """Folder below the server's folder of adapters, or the full path of one there."""


class UnloadFields(CheckedFields):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: AdapterName


async def load_adapter(call: Call) -> JSONResponse:
    """Handle `POST /v1/load_lora_adapter`."""
    service, fields = call.service, check_fields(LoadFields, await call.body())
    _check_loads_adapters(service)
    card = service.card()
    async with service.loading:
        if fields.lora_name in service.names:
            raise bad_request(f"{fields.lora_name} is here already: unload it first", "lora_name", "adapter_exists")
        await service.engine.change_adapter(fields.lora_name, fields.lora_path)
    return JSONResponse({"id": fields.lora_name, "object": "model", "parent": card.name, "loaded": True})


async def unload_adapter(call: Call) -> JSONResponse:
    """Handle `POST /v1/unload_lora_adapter`: its requests in flight continue to their end."""
    service, fields = call.service, check_fields(UnloadFields, await call.body())
    _check_loads_adapters(service)
    card = service.card(fields.lora_name)
    if fields.lora_name == card.name:
        raise bad_request(f"{card.name} is the model itself: name an adapter", "lora_name")
    async with service.loading:
        await service.engine.change_adapter(fields.lora_name, None)
    return JSONResponse({"id": fields.lora_name, "object": "model", "parent": card.name, "loaded": False})


def _check_loads_adapters(service: Service) -> None:
    """Raise ApiError if the server was started without a folder of adapters."""
    if not service.loads_adapters:
        raise ApiError(
            403, "this server loads and unloads no adapters: start it with --adapter-dir DIR", code="adapters_are_fixed"
        )
