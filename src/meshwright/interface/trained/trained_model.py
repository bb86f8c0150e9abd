"""A trained model: it answers prompts and scores texts, alone or with adapters on top. `opening` reads one."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import torch

from meshwright.data import Corpus, Tokenizer, prepare
from meshwright.data.corpus.corpus import MixedStream, TokenStream
from meshwright.data.preparation import form_of
from meshwright.data.sequences.numbered_rows import MixedRows, numbered_rows
from meshwright.formats.hub import import_folder
from meshwright.formats.hub.adapter import is_adapter, load_adapter
from meshwright.interface.answers.answer import Place, checked, folder_of
from meshwright.interface.answers.markup import whole
from meshwright.model import Sampling, Transformer
from meshwright.model.generate import generate
from meshwright.parallel import on_one_device
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.loaded_adapters import LoadedAdapters
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.rows.serving_ranks import ServingRanks
from meshwright.serving.engine.served_request import ServedAnswer
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.serving.http.server_options import ServerLimits, ServerOptions
from meshwright.spec import Data, Plan, Recipe, num_parameters
from meshwright.spec.errors import ArgumentError, DataError, PlanError, argument
from meshwright.spec.model.shape import SAME_BASE
from meshwright.spec.plan.execution import GPU_SEQUENCES
from meshwright.spec.plan.plan import RANDOM, SAMPLES
from meshwright.spec.recipe.recipe import CROSS_ENTROPY
from meshwright.spec.units import count, many
from meshwright.store import checkpoint as checkpoints
from meshwright.store import checkpoint_folder
from meshwright.store.model_weights import base_fingerprint, locate, weights
from meshwright.training.optimizer.precision import DTYPES

if TYPE_CHECKING:
    from meshwright.data.chat.template import ChatTemplate
    from meshwright.training.step.evaluate import HeldOutRows
    from meshwright.training.step.watch import EvalMetrics

LONGEST = 2048
"""Tokens of a scored window, for a Hugging Face directory, which does not record its training length."""
ROWS_TOKENS = 8192
"""Tokens of one forward pass of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A prompt and its continuation."""

    text: str | None
    """The new tokens as text. None = there is no tokenizer."""
    prompt: str | None
    """None = the prompt was ids, and there is no tokenizer."""
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """New tokens. The last may be one that ends a text."""
    logprobs: tuple[float, ...]
    """Log-probability of each, without temperature."""

    def __str__(self) -> str:
        return ",".join(map(str, self.ids)) if self.text is None else f"{self.prompt or ''}{self.text}"

    def _repr_html_(self) -> str:
        new = str(self) if self.text is None else self.text
        return whole(f'<pre><span class="prompt">{escape(self.prompt or "")}</span>{escape(new)}</pre>')


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainedModel:
    """A model ready to answer, with what is stored next to it."""

    model: Transformer
    tokenizer: Tokenizer | None
    """None = the Hugging Face directory has none."""
    tokenizer_file: str
    """Its path, as for `data.tokenizer`."""
    plan: Plan | None
    """Plan of the run. None = not a run."""
    stop_ids: tuple[int, ...]
    """Tokens that end a text."""
    path: Path = Path()
    """Path that it was read from."""
    generation: Mapping[str, object] = field(default_factory=dict)
    """Its generation_config.json."""
    ranks: ServingRanks | None = None
    """Ranks that hold the other parts of the model. None = it is whole."""

    @checked
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        adapter: str | Path | None = None,
    ) -> Generated:
        """Continue a text, or token ids, until the model ends it. Raises PlanError, ArgumentError.

        Args:
            prompt: Text, or token ids.
            max_new_tokens: Most new tokens.
            temperature: Sampling temperature, 0 = always the likeliest token.
            top_k: Sample from the k likeliest tokens only, 0 = all.
            top_p: Sample from the likeliest tokens that together reach p only.
            seed: Seed of the sampling.
            on_token: Called with each new token.
            adapter: A LoRA adapter to apply, as those of `engine`.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        with nullcontext() if adapter is None else beside(adapter, self.model, self.path):
            generated = generate(
                self.model, ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=self.stop_ids,
                on_token=on_token,
            )  # fmt: skip
        return self._answer(prompt, ids, generated.ids, generated.logprobs)

    @checked
    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        engine: EngineOptions | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> tuple[Generated, ...]:
        """Continue many texts, or lists of token ids, at once.

        `options`: for all prompts, or one for each; None = greedy. With n answers per prompt, they follow each other.
        `adapters`: as for `engine`. Raises PlanError, ArgumentError.
        """
        options_of_prompts = (
            [options or RequestOptions()] * len(prompts) if not isinstance(options, Sequence) else list(options)
        )
        if len(options_of_prompts) != len(prompts):
            raise ArgumentError(
                "options",
                sentence=(
                    f"options has {len(options_of_prompts)} entries for {len(prompts)} prompts: give one, or one each"
                ),
            )
        ids = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        serving = self.engine(engine or self._options_for(ids, options_of_prompts), adapters=adapters)
        requests = [
            serving.add(prompt_ids, prompt_options)
            for prompt_ids, prompt_options in zip(ids, options_of_prompts, strict=True)
        ]
        serving.run(requests)
        answered = zip(prompts, requests, strict=True)
        return tuple(
            self._generated(prompt, request.prompt, answer)
            for prompt, request in answered
            for answer in request.answers
        )

    def _options_for(self, ids: Sequence[Sequence[int]], asked: Sequence[RequestOptions]) -> EngineOptions:
        """Return options for these answers alone. Those of a server would take most of the caller's GPU."""
        if self.model.embed.weight.device.type == "cpu" or not ids:
            return EngineOptions(warm_start=False)
        needed = max(len(prompt) + options.max_new_tokens for prompt, options in zip(ids, asked, strict=True))
        return EngineOptions(
            warm_start=False, most_sequences=min(GPU_SEQUENCES, sum(options.n for options in asked)),
            longest=min(needed, self.model.shape.max_positions),
        )  # fmt: skip

    @checked
    def engine(
        self, options: EngineOptions | None = None, *, adapters: Mapping[str, str | Path] | None = None
    ) -> ServingEngine:
        """Return an engine that answers many requests with this model, step by step.

        `adapters`: folders in PEFT's format or runs with model.lora, by the names that requests use. Raises
        ArgumentError, HubError, CheckpointError.
        """
        decode = self.tokenizer.decode if self.tokenizer else None
        return ServingEngine(
            self.model, options, decode=decode, end_ids=self.stop_ids, tokenizer=self.tokenizer,
            adapters=opened_adapters(adapters, self.model, self.path), ranks=self.ranks,
        )  # fmt: skip

    @checked
    def open_adapter(self, path: str | Path) -> ServedAdapter:
        """Open an adapter for `ServingEngine.adapters.load` while the engine runs. Raises as `engine`."""
        return opened_adapter(Path(path).name, Path(path), self.model, self.path)

    @checked
    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        keys: Sequence[str] = (),
        without_key: bool = False,
        name: str | None = None,
        engine: EngineOptions | None = None,
        limits: ServerLimits | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        adapter_dir: str | Path | None = None,
        generation_config: bool = True,
    ) -> None:
        """Answer HTTP requests until SIGTERM or Ctrl-C, and finish those in progress. Raises ArgumentError.

        Args:
            host: Address to listen on.
            port: Port to listen on, 0 = any free one.
            keys: Accepted keys. Without one the server listens on this machine only, unless `without_key`.
            without_key: Listen beyond this machine without any key.
            name: Name of the model in requests. None = the name of its folder.
            engine: Options of the engine.
            limits: Limits of requests.
            adapters: As for `engine`. Each is a model of its own in requests.
            adapter_dir: Folder of adapters that requests may load.
            generation_config: Take temperature, top_p and the like from the model, where a request gives none.
        """
        from meshwright.interface.trained.serving import run, served_name, server_of

        called = name or served_name(self.path)
        options = ServerOptions(
            host=host, port=port, keys=tuple(keys), without_key=without_key, limits=limits or ServerLimits(),
            adapter_folder=None if adapter_dir is None else Path(adapter_dir),
        )  # fmt: skip
        hosted = self.hosted(called, adapters=adapters, generation_config=generation_config)
        run(server_of(called, lambda: hosted, options, engine or EngineOptions()))

    def hosted(
        self, name: str, *, draft: Transformer | None = None, adapters: Mapping[str, str | Path] | None = None,
        generation_config: bool = True,
    ) -> HostedModel:  # fmt: skip
        """Return the model as a server takes it, under its name in requests.

        `draft`: the model that guesses for it. `adapters`: as for `engine`. `generation_config`: as for `serve`.
        """
        from meshwright.serving.http.request.request_fields import sampling_defaults

        return HostedModel(
            name=name, model=self.model, tokenizer=self.tokenizer, end_ids=self.stop_ids, created=int(time()),
            draft=draft, adapters=opened_adapters(adapters, self.model, self.path), ranks=self.ranks,
            open_adapter=partial(peft_adapter, self.model),
            sampling=sampling_defaults(self.generation) if generation_config else {},
        )  # fmt: skip

    def _generated(self, prompt: str | Sequence[int], ids: Sequence[int], answer: ServedAnswer) -> Generated:
        """Return an answer of the engine. A stop string ends the text, not the ids."""
        generated = self._answer(prompt, ids, answer.ids, answer.logprobs)
        return replace(generated, text=answer.text) if answer.options.stop else generated

    def _answer(
        self, prompt: str | Sequence[int], prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]
    ) -> Generated:
        tokenizer = self.tokenizer
        return Generated(
            prompt=prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids) if tokenizer else None,
            prompt_ids=tuple(prompt_ids),
            ids=tuple(ids),
            logprobs=tuple(logprobs),
            text=tokenizer.continuation_text(prompt_ids, ids) if tokenizer else None,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt.

        They begin like a document if the tokenizer has a mark for that alone, or if there is no text. Raises PlanError
        without a tokenizer.
        """
        if self.tokenizer is None:
            raise PlanError(f"{self.path} has no tokenizer.json to read a text with: give the prompt as token ids")
        return self.tokenizer.begin(text)

    def encode_chat(self, turn: str) -> list[int]:
        """Return the ids of a user's turn, by the chat template of the model.

        Raises PlanError without a tokenizer, DataError when the template fails.
        """
        return self.encode_messages([{"role": "user", "content": turn}])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation, by the chat template of the model. Raises as `encode_chat`."""
        from meshwright.data.chat.rendering import chat_prompt

        return chat_prompt(*self.chat_template(), messages)

    def chat_template(self) -> tuple[Tokenizer, "ChatTemplate"]:
        """Return the tokenizer and its chat template. Raises PlanError without a tokenizer."""
        from meshwright.data.chat.rendering import template_of

        tokenizer = self.tokenizer
        if tokenizer is None:
            raise PlanError(f"{self.path} has no tokenizer.json, and so no chat template: give the prompt as token ids")
        return tokenizer, template_of(tokenizer)

    @checked
    def evaluate(self, data: str | Path | None = None, *, sequences: int = 0) -> "EvalMetrics":
        """Score the model on a text: nats per token, perplexity, bits per byte.

        `data`: text to score in full. None = the held-out part of the run; of a mixture, each source and their weighted
        mean, as the run does. `sequences`: most windows, 0 = all. Raises PlanError, DataError.
        """
        if sequences < 0:
            raise ArgumentError("sequences", sequences, "must be 0 (all) or more")
        rows = self.held_out_rows(data, sequences)
        engine, device = on_one_device(self.model), self.model.embed.weight.device
        if not isinstance(rows.stream, MixedStream) or not isinstance(rows.rows, MixedRows):
            return rows.evaluate(engine, device)
        assert self.plan is not None, "a text that was given is one source"
        from meshwright.training.step.evaluate import score_sources

        rows_of_stream = dict(zip(map(id, rows.stream.parts), rows.rows.rows, strict=True))

        def score(_: Data, stream: TokenStream, limit: int) -> "EvalMetrics":
            return replace(rows, rows=rows_of_stream[id(stream)], stream=stream, limit=limit).evaluate(engine, device)

        scores = score_sources(self.plan.data, rows.stream, sequences, score)
        assert scores is not None, "held_out_rows refuses what has nothing held out"
        return scores

    def held_out_rows(
        self, data: str | Path | None, sequences: int, *, apart: bool = False, trained: bool = False
    ) -> "HeldOutRows":
        """Return the rows that `evaluate` scores.

        `apart`: a row for each sample, whose loss is the same as in a shared row. `trained`: rows of the training text
        instead of the held-out part.
        """
        from meshwright.training.step.evaluate import HeldOutRows

        settings, corpus = self._corpus(data)
        settings = replace(settings, packing="off") if apart else settings
        stream = corpus.validation if data is None and not trained else corpus.train
        if stream.num_tokens < 2:
            part = str(data) if data is not None else "what the run trained on" if trained else "what the run held out"
            raise DataError(
                f"{part} is too short: it has {many(stream.num_tokens, 'token')}, and a score takes at least 2. "
                f"Give a longer text as {argument('data', 'PATH')}"
            )
        recipe = self.plan.recipe if self.plan else Recipe(sequence=min(LONGEST, self.model.shape.max_positions))
        # Whatever a run was trained for, a score is nats per token.
        recipe = replace(recipe, objective=CROSS_ENTROPY)
        if any(part.pairs for part in corpus.train.parts):
            raise DataError(
                "a file of preferences cannot be scored without the run's first weights: read loss and accuracy "
                f"in the run's metrics.jsonl, or give {argument('data')} a text or conversations"
            )
        return HeldOutRows(
            rows=numbered_rows(settings, replace(recipe, seed=0), corpus, stream, shuffle=False),
            stream=stream,
            document_mask=recipe.document_mask,
            at_once=max(1, ROWS_TOKENS // recipe.sequence),
            limit=sequences,
        )

    def _corpus(self, path: str | Path | None) -> tuple[Data, Corpus]:
        """Return settings and corpus: all of the text at a path, or what the run trained on and held out."""
        if self.tokenizer is None:
            raise PlanError(f"{self.path} has no tokenizer.json to read a text with: put its tokenizer there")
        data = self.plan.data if self.plan and (path is None or self.plan.data.form != "text") else Data()
        data = replace(data, tokenizer=self.tokenizer_file)
        if path is not None:
            data = replace(data, path=str(path), mixture=(), validation=0.0)
            try:
                data = data if data.form == SAMPLES else replace(data, form=form_of(data))
                return data, prepare(data)
            except DataError as error:
                raise DataError(str(error).replace("data.path=", "data=")) from None
        if self.plan is None:
            raise ArgumentError(
                "data",
                sentence=(
                    f"{self.path} does not say which text to score it on: give {argument('data', 'PATH')}, or "
                    f"{argument('data', 'stdlib')}"
                ),
            )
        return data, prepare(data)

    def __repr__(self) -> str:
        weight = self.model.embed.weight
        dtype = next(name for name, kind in DTYPES.items() if kind == weight.dtype)
        parameters = count(num_parameters(self.model.shape))
        return f"{self.model.shape.name}: {parameters} parameters, {dtype} on {weight.device} ({self.path})"


def warn_of_missing_template(model: TrainedModel) -> None:
    """Print one line on stderr if a tokenizer has no chat template, and the default one is used."""
    if model.tokenizer is not None and not model.tokenizer.chat_template:
        print(
            f"{model.path} has no chat template: turns begin with '### user', which a model without fine-tuning on "
            "conversations has not learned", file=sys.stderr,
        )  # fmt: skip


def opened_adapters(
    locations: Mapping[str, Place] | None, model: Transformer, source: Path
) -> dict[str, ServedAdapter]:
    """Open adapters, by name, for requests to a model that was read from `source`.

    Raises ArgumentError, HubError or CheckpointError when one cannot be opened or does not fit.
    """
    adapters = {
        name: opened_adapter(name, folder_of(location), model, source) for name, location in (locations or {}).items()
    }
    for name, adapter in adapters.items():
        adapter.check(name, model)
    return adapters


def opened_adapter(name: str, path: Path, model: Transformer, source: Path) -> ServedAdapter:
    """Open one adapter of a model that was read from `source`. Raises as `opened_adapters`."""
    if is_adapter(path):
        return peft_adapter(model, path)
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_checkpoint(path):
        return _adapter_of_run(name, path, source)
    raise ArgumentError(
        "adapter",
        name,
        remedy=(
            f"{path} has neither adapter_config.json nor plan.yaml: give a folder that PEFT or "
            "`meshwright export --adapter` has written, or a run with model.lora"
        ),
    )


def peft_adapter(model: Transformer, path: Path, widest: int = 0) -> ServedAdapter:
    """Open an adapter in PEFT's format, of at most rank `widest` (0 = any). Raises HubError."""
    shape, tensors = load_adapter(path, model.shape.base, widest)
    assert shape.lora is not None
    return ServedAdapter(shape.lora, tensors)


def _adapter_of_run(name: str, path: Path, source: Path) -> ServedAdapter:
    """Open the adapter of a checkpoint, if `source` has the very weights that it was trained on."""
    run, checkpoint = locate(path)
    lora, init = run.plan.model.lora, run.plan.init
    if lora is None:
        raise ArgumentError(
            "adapter", name, remedy=f"{path} trained all weights and has no adapter: give it as the model"
        )
    if init == RANDOM:
        raise ArgumentError(
            "adapter",
            name,
            remedy=f"{path} began from random weights, which no folder holds: give the run as the model",
        )
    if lora.base != SAME_BASE:
        raise ArgumentError(
            "adapter",
            name,
            "needs its own codes",
            (
                f"{path} trained it on {lora.base}. For other weights write it in PEFT's format "
                "(`meshwright export --adapter`)"
            ),
        )
    # An adapter corrects these very weights. On top of others it would answer nonsense without any error.
    trained_beside = checkpoints.read_values(checkpoint).get("base")
    fingerprint = import_folder(source).fingerprint() if (source / "config.json").is_file() else ""
    if trained_beside != base_fingerprint(run.plan) or trained_beside != fingerprint:
        raise ArgumentError(
            "adapter",
            name,
            "does not fit",
            (
                f"{path} trained it on the weights of {init}, and {source} has others. Give the folder "
                "that model.init names as the model"
            ),
        )
    return ServedAdapter(lora, dict(weights(checkpoint, torch.float32, verified=True)))


def named_folder(location: Place | None) -> dict[str, Path]:
    """Return an adapter under the name of its folder, or nothing for None."""
    if location is None:
        return {}
    folder = folder_of(location)
    return {folder.resolve().name: folder}


@contextmanager
def beside(location: Place, model: Transformer, source: Path) -> Iterator[None]:
    """Apply an adapter to all rows of a model within `with`. Raises as `opened_adapters`."""
    folders = named_folder(location)
    adapters = LoadedAdapters(model, exact=False)
    for name, adapter in opened_adapters(folders, model, source).items():
        adapters.load(name, adapter)
    with adapters.by_number.apply_to({adapters.number(name): slice(None) for name in folders}):
        yield
