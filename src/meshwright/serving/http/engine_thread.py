"""Engine's thread: it opens the model, takes commands from a queue, and sends one message after each step.

A message has the new tokens of all answers that grew. The HTTP process makes text, stop strings, JSON and metrics of it
(engine_link.py), so none of these delays a step.

Adapters may be loaded while the server runs. A path must lead into the server's folder of adapters. A file is read in a
separate thread, so answers continue; then the engine takes the adapter between two steps.
"""

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import final

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.formats.hub.adapter_config import CONFIG, WEIGHTS
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.rows.serving_ranks import ServingRanks
from meshwright.serving.engine.served_request import ServedAnswer, ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.channel import (
    AdapterCall,
    AdapterReply,
    AddedPrompt,
    ApiError,
    CancelledAnswers,
    Channel,
    EngineFigures,
    FrameKind,
    ModelCard,
    StepNews,
    bad_request,
    encode_scores,
    internal_error,
)
from meshwright.serving.http.server_options import ServerOptions
from meshwright.spec.errors import ArgumentError, MeshwrightError, RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """Opened model and its name."""

    name: str
    """Name in requests and `/v1/models`."""
    model: Transformer
    tokenizer: Tokenizer | None
    """Tokenizer. None = prompts and answers are token ids."""
    end_ids: tuple[int, ...]
    """Tokens that end a text."""
    created: int
    """Seconds since 1970."""
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    """Adapters at the start of the server, by the names that requests give in the model's place."""
    open_adapter: Callable[[Path, int], ServedAdapter] | None = None
    """Function (folder, largest rank) that reads an adapter while the server runs. None = impossible."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults of requests: `sampling_defaults`."""
    draft: Transformer | None = None
    """Small draft model, for engine options with speculation but without one."""
    ranks: ServingRanks | None = None
    """Ranks with the other parts of the model. None = it is whole."""

    def __post_init__(self) -> None:
        """Raise ArgumentError if an adapter has the model's name."""
        if self.name in self.adapters:
            raise ArgumentError("adapter", self.name, "is the model's own name", "give one of them another")

    def engine(self, options: EngineOptions) -> ServingEngine:
        """Start an engine that has answered once, so the first request does not wait for one-time work."""
        if options.speculation is not None and options.speculation.draft is None:
            options = replace(options, speculation=replace(options.speculation, draft=self.draft))
        engine = ServingEngine(
            self.model, replace(options, record=None), end_ids=self.end_ids, tokenizer=self.tokenizer,
            adapters=self.adapters, ranks=self.ranks,
        )  # fmt: skip
        engine.run([engine.add([0], RequestOptions(max_new_tokens=2, ignore_end=True, salt=None))])
        engine.record(options.record)
        return engine

    def card(self, engine: ServingEngine) -> ModelCard:
        """Return the facts that the HTTP process needs."""
        return ModelCard(
            name=self.name, tokenizer=self.tokenizer, end_ids=self.end_ids, created=self.created,
            sampling=self.sampling,
            longest=engine.longest, most_sequences=engine.options.most_sequences, adapters=engine.adapters.names,
        )  # fmt: skip


OpenModel = Callable[[], HostedModel]
"""Function that opens the model, called in the engine's thread."""


EngineChange = Callable[[ServingEngine | None], None]
"""Function called between two steps, with None after the engine has failed. An exception in it ends the engine."""
Command = AddedPrompt | CancelledAnswers | EngineChange
"""Request of another thread."""


@dataclass(slots=True)
class _FollowedRequest:
    """Request that grows."""

    added: AddedPrompt
    request: ServedRequest
    cached_sent: bool = False


@dataclass(slots=True)
class _SentAnswer:
    """Growing answer, with the number of tokens already sent to the HTTP process."""

    number: int
    request: _FollowedRequest
    tokens: int = 0


@final
class EngineThread:
    """Thread that opens a model and answers prompts with it until stopped."""

    def __init__(self, open_model: OpenModel, options: EngineOptions, channel: Channel) -> None:
        self.hosted: HostedModel | None = None
        self.engine: ServingEngine | None = None
        """Engine for inspection. Only its own thread may call it."""
        self.failure: BaseException | None = None
        """Reason why the model cannot be opened, or the engine has failed."""
        self._open, self._options, self._channel = open_model, options, channel
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._sent: dict[ServedAnswer, _SentAnswer] = {}
        self._requests: dict[int, _FollowedRequest] = {}
        self._waiting: list[_FollowedRequest] = []
        self._figures, self._adapter_bytes, self._adapters_changed = EngineFigures(), 0, False
        self._thread = threading.Thread(target=self._main, name="meshwright-engine", daemon=True)

    def start(self) -> None:
        """Start to open the model."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queue a command for the time before the next step."""
        self._commands.put(command)

    def stop(self, wait_s: float) -> None:
        """End the thread after its step. Ranks in a longer step are abandoned: they would not read a message."""
        self._commands.put(None)
        self._thread.join(wait_s)
        # A step over ranks may hang in a collective, which nothing here can end.
        if self._thread.is_alive() and self.hosted is not None and self.hosted.ranks is not None:
            self.hosted.ranks.broken = True

    # Methods that run in the thread.

    def _main(self) -> None:
        try:
            self.hosted = hosted = self._open()
            self.engine = engine = hosted.engine(self._options)
            self._channel.send(FrameKind.MODEL, [hosted.card(engine).encode()])
            self._run(engine)
        except BaseException as error:
            # A model that cannot be opened is reported by its caller; a defect of the engine has only this traceback.
            if self.engine is not None:
                traceback.print_exc()
            self.failure = error
            self._channel.send(FrameKind.FAILED)
            self._fail_changes()

    def _run(self, engine: ServingEngine) -> None:
        while True:
            news = StepNews()
            # Commands come between steps only, so no lock guards the engine. An idle thread sleeps in the queue.
            for command in self._pending_commands(wait=engine.idle):
                if command is None:
                    return
                if isinstance(command, AddedPrompt):
                    self._add(engine, command, news)
                elif isinstance(command, CancelledAnswers):
                    self._cancel(engine, command, news)
                else:
                    # A change may have loaded or unloaded adapters, whose bytes are then counted again.
                    self._adapters_changed = True
                    command(engine)
            if not engine.idle:
                self._step(engine, news)
            self._send(engine, news)

    def _send(self, engine: ServingEngine, news: StepNews) -> None:
        figures = self._engine_figures(engine)
        # Without news there is no message, so an idle server sends nothing.
        if news.tokens or figures != self._figures or news.rare:
            news.at, news.figures = monotonic(), figures
            self._figures = figures
            self._channel.send(FrameKind.STEP, news.encode())

    def _pending_commands(self, *, wait: bool) -> Iterator[Command | None]:
        """Yield the queued commands. With `wait`, block for the first one."""
        if wait:
            yield self._commands.get()
        while True:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def _add(self, engine: ServingEngine, added: AddedPrompt, news: StepNews) -> None:
        try:
            if added.scored is not None:
                scores = engine.score(added.prompt, added.scored, added.options.adapter)
                parts = [str(added.task).encode(), *encode_scores(scores.logprobs, scores.top)]
                self._channel.send(FrameKind.SCORES, parts)
            request = engine.add(added.prompt, added.options)
        except MeshwrightError as error:
            reason = "engine" if isinstance(error, RunError) else "request"
            news.refused.append((added.task, reason, str(error)))
            return
        except Exception as error:  # a library that fails with one request must not end the others
            traceback.print_exc()
            news.refused.append((added.task, "defect", str(error)))
            return
        followed = self._requests[added.task] = _FollowedRequest(added, request)
        for number, answer in enumerate(request.answers, added.first_answer):
            self._sent[answer] = _SentAnswer(number, followed)
        self._waiting.append(followed)
        for answer in request.answers:
            if answer.ending:
                self._end(answer, news)

    def _cancel(self, engine: ServingEngine, cancelled: CancelledAnswers, news: StepNews) -> None:
        followed = self._requests.get(cancelled.task)
        if followed is None:
            return
        request, first = followed.request, followed.added.first_answer
        numbers = range(first, first + len(request.answers)) if cancelled.answers is None else cancelled.answers
        # Some may have ended in the same step: their endings were sent already.
        growing = [answer for number in numbers if not (answer := request.answers[number - first]).ending]
        engine.cancel(request, growing)
        for answer in growing:
            self._end(answer, news)

    def _step(self, engine: ServingEngine, news: StepNews) -> None:
        grown = engine.step()
        if self._waiting:
            self._note_started(news)
        sent_answers, answers, tokens = self._sent, news.answers, news.tokens
        for answer in grown:
            sent, ids = sent_answers[answer], answer.ids
            new = len(ids) - sent.tokens
            # Usually one token: append without two temporary lists.
            if new == 1:
                answers.append(sent.number)
                tokens.append(ids[-1])
            else:
                answers += [sent.number] * new
                tokens += ids[sent.tokens :]
            sent.tokens += new
            if not sent.request.cached_sent and new:
                self._note_cached(sent.request, news)
            if sent.request.added.with_logprobs:
                news.scored += range(len(tokens) - new, len(tokens))
                news.logprobs += answer.logprobs[-new:] if new else ()
                news.top += answer.top[-new:] if new else ()
            if answer.ending:
                self._end(answer, news)

    def _note_started(self, news: StepNews) -> None:
        started = [followed for followed in self._waiting if followed.request.has_started]
        news.started += [followed.added.task for followed in started]
        self._waiting = [followed for followed in self._waiting if not followed.request.has_started]

    def _note_cached(self, followed: _FollowedRequest, news: StepNews) -> None:
        followed.cached_sent = True
        news.cached.append((followed.added.task, followed.request.cached))

    def _end(self, answer: ServedAnswer, news: StepNews) -> None:
        sent = self._sent.pop(answer)
        news.ended.append((sent.number, answer.ending))
        followed = sent.request
        if followed.request.ended:
            self._requests.pop(followed.added.task, None)  # several of its answers may end in the same step
            if followed in self._waiting:
                self._waiting.remove(followed)

    def _fail_changes(self) -> None:
        """Answer callers of changes after the engine has failed. The HTTP process refuses prompts."""
        while (command := self._commands.get()) is not None:
            if not isinstance(command, AddedPrompt | CancelledAnswers):
                command(None)

    def _engine_figures(self, engine: ServingEngine) -> EngineFigures:
        tables, scheduler, guesses, adapters = engine.tables, engine.scheduler, engine.guesses, engine.adapters
        pool, host = tables.pool, tables.pool.host
        # Only after a change: the byte count is a sum over all layers.
        if adapters.count != self._figures.adapters or self._adapters_changed:
            self._adapter_bytes, self._adapters_changed = adapters.bytes, False
        return EngineFigures(
            running=len(scheduler.running),
            waiting=len(self._waiting),
            blocks=pool.size,
            free_blocks=pool.free,
            adapters=adapters.count,
            adapter_bytes=self._adapter_bytes,
            preemptions=scheduler.preemptions,
            queries=tables.asked,
            hits=tables.hits,
            host_hits=tables.host_hits,
            host_saved=host.saved if host else 0,
            guessed=guesses.guessed if guesses else 0,
            accepted=guesses.accepted if guesses else 0,
        )


MOST_CONFIG_BYTES = 2**20


def answer_adapter_call(call: AdapterCall, thread: EngineThread, options: ServerOptions, channel: Channel) -> None:
    """Read the adapter in a thread, pass it to the engine, and reply. The HTTP process makes one call at a time."""
    threading.Thread(target=_answer_call, args=(call, thread, options, channel), daemon=True).start()


def _answer_call(call: AdapterCall, thread: EngineThread, options: ServerOptions, channel: Channel) -> None:
    adapter: ServedAdapter | None = None
    try:
        if call.path is not None:
            adapter = _open_adapter(call.name, call.path, thread, options)
    except Exception as error:
        if not isinstance(error, ApiError):
            traceback.print_exc()
            error = internal_error()
        channel.send(FrameKind.CHANGED, AdapterReply(call.call, _names(thread.engine), error).encode())
        return

    # Runs in the engine's thread. A RunError of a living engine is raised again, which ends that engine.
    def change(engine: ServingEngine | None) -> None:
        error: ApiError | None = None
        try:
            if engine is None:
                raise RunError("the engine has failed: restart the server, and see its log")
            if adapter is None:
                engine.adapters.unload(call.name)
            else:
                engine.adapters.load(call.name, adapter)
        except RunError as failure:
            error = ApiError(503, str(failure), code="engine_failed", retry_seconds=30)
            if engine is not None:
                raise
        except MeshwrightError as failure:
            error = bad_request(str(failure), "lora_name")
        except Exception:
            traceback.print_exc()
            error = internal_error()
        finally:
            channel.send(FrameKind.CHANGED, AdapterReply(call.call, _names(engine), error).encode())

    thread.put(change)


def _names(engine: ServingEngine | None) -> tuple[str, ...]:
    return () if engine is None else engine.adapters.names


def _open_adapter(name: str, path: str, thread: EngineThread, options: ServerOptions) -> ServedAdapter:
    """Open an adapter. Raises ApiError if it is damaged, of another model, unservable, or one too many."""
    hosted, engine, limits, root = thread.hosted, thread.engine, options.limits, options.adapter_folder
    assert hosted is not None and engine is not None and root is not None, "the HTTP process has refused this"
    # Before the file is read: memory is what the limit protects.
    if engine.adapters.count >= limits.max_adapters:
        raise ApiError(
            409,
            f"{limits.max_adapters} adapters take memory already: unload one, and wait for its requests",
            code="too_many_adapters",
        )
    if hosted.open_adapter is None:
        raise bad_request("this model was opened without its folder, and takes no more adapters")
    try:
        folder = _resolve_folder(root, path, limits.max_adapter_bytes)
    except (OSError, RuntimeError, ValueError):  # too long, a cycle of links, or an impossible character
        raise bad_request("lora_path is no path of this machine", "lora_path", "no_adapter") from None
    try:
        adapter = hosted.open_adapter(folder, int(limits.max_adapter_rank))
        adapter.check(name, hosted.model)
    except MeshwrightError as error:
        raise bad_request(str(error).replace(str(folder), path), "lora_path", "no_adapter") from None
    except OSError:  # another owner's file, or removed meanwhile
        raise bad_request("lora_path cannot be read", "lora_path", "no_adapter") from None
    return adapter


def _resolve_folder(root: Path, path: str, most_bytes: int) -> Path:
    """Return an adapter's folder. Raises ApiError outside the server's folder, without adapter, or too large."""
    # Links are followed before the check, so none can lead out of the folder.
    root = root.resolve()
    folder = (root / path).resolve()
    files = {folder / CONFIG: MOST_CONFIG_BYTES, folder / WEIGHTS: most_bytes}
    if not all(file.resolve().is_relative_to(root) for file in (folder, *files)):
        raise ApiError(
            403, "lora_path leads out of the folder of adapters", code="outside_adapter_dir", param="lora_path"
        )
    if not all(file.is_file() for file in files):
        raise bad_request(f"lora_path is no folder with {CONFIG} and {WEIGHTS}", "lora_path", "no_adapter")
    for file, most in files.items():
        if file.stat().st_size > most:
            raise bad_request(f"{file.name} is larger than {most:,} bytes", "lora_path", "adapter_too_large")
    return folder
