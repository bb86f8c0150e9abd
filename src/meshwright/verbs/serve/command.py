"""`meshwright serve MODEL`: serve a model over HTTP. Options of the engine come first, then those of the server."""

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from meshwright.interface.answers.answer import check_new_file
from meshwright.interface.options import Checkpoint, ModelPath, ServedDtype, named_adapters
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.extras import require
from meshwright.spec.plan.execution import MEMORY_SHARE, CacheForm, HeadForm
from meshwright.verbs.serve.screen import in_full, in_short

if TYPE_CHECKING:
    from meshwright.interface.trained.trained_model import TrainedModel
    from meshwright.serving.engine.speculation import Speculation
    from meshwright.serving.http.engine_thread import HostedModel
    from meshwright.serving.http.http_server import HttpServer


KEY_VARIABLE = "MESHWRIGHT_API_KEY"
_engine = partial(typer.Option, rich_help_panel="Engine")
_limit = partial(typer.Option, rich_help_panel="Limits")
"""Options, by the panel of the help that lists them."""


def check_tensor_ranks(tp: int, ep: int) -> None:
    """Raise ArgumentError unless `tp` processes can share a model and spread experts over `ep` of them."""
    for name, ranks in (("tp", tp), ("ep", ep)):
        if ranks < 1:
            raise ArgumentError(name, ranks, "must be at least 1")
    if ep > 1 and tp == 1:
        raise ArgumentError(
            "ep", ep, "spreads experts over the processes of tp, and there is one", f"add {argument('tp', ep)}"
        )


def check_guesses(tokens: int | None, ngram: int | None, draft: Path | None) -> None:
    """Raise ArgumentError for options of guesses that contradict each other or are out of range."""
    for name, number, least in (("guess_tokens", tokens, 1), ("guess_ngram", ngram, 2)):
        if number is not None and number < least:
            raise ArgumentError(name, number, f"must be at least {least}")
    if draft is not None and ngram is not None:
        raise ArgumentError(
            "guess_ngram",
            ngram,
            f"has no effect with {argument('draft', draft)}, which guesses instead of a look-up",
            "leave one out",
        )
    if ngram is not None and tokens is None:
        raise ArgumentError("guess_ngram", ngram, "has no effect without guesses", f"add {argument('guess_tokens', 8)}")


def check_copies(mib: int | None, cache_dtype: str) -> None:
    """Raise ArgumentError when copies are requested for an 8-bit cache, which has none."""
    if mib and cache_dtype != "model":
        raise ArgumentError(
            "copies_mib",
            mib,
            f"has no effect with {argument('cache_dtype', cache_dtype)}",
            f"leave copies_mib out, or take {argument('cache_dtype', 'model')}",
        )


def serve(
    model: ModelPath,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"Accepted keys, one per line. A single key can be in ${KEY_VARIABLE}.")
    ] = None,
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Listen beyond this machine without any key.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests.  [default: its folder]")] = None,
    dtype: ServedDtype = "auto",
    checkpoint: Checkpoint = "last",
    generation_config: Annotated[
        bool,
        typer.Option(
            help="Take temperature, top_p and the like from generation_config.json, where a request gives none."
        ),
    ] = True,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="LoRA adapter that requests name as their model: a PEFT folder, or a run with model.lora. Repeatable.",
        ),
    ] = None,
    adapter_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Let requests load PEFT adapters from this folder, and unload any, while the server runs.",
        ),
    ] = None,
    exact: Annotated[
        bool, _engine("--exact", help="Answers do not depend on other requests, to the last bit. On CPUs.")
    ] = False,
    cache_mib: Annotated[
        int, _engine(help="Memory of the KV cache; 0 = 1024 on a CPU, --memory-share on a GPU.", metavar="INT", min=0)
    ] = 0,
    memory_share: Annotated[
        float,
        _engine(
            help="On a GPU: share of the memory left by weights, graphs and one step that the KV cache takes.",
            metavar="SHARE",
        ),
    ] = MEMORY_SHARE,
    second_layouts: Annotated[
        bool,
        _engine(help="On a GPU: also keep 4-bit codes in a second layout, or as 16-bit numbers, where that is faster."),
    ] = False,
    cache_dtype: Annotated[
        str, _engine(help="Dtype of the KV cache: that of the model (model), or 8 bits: int8, fp8.")
    ] = "model",
    host_cache_mib: Annotated[
        int,
        _engine(help="On a GPU: host memory for prefixes evicted from the KV cache; 0 = none.", metavar="INT", min=0),
    ] = 0,
    block: Annotated[int, _engine(help="Positions per block of the KV cache.")] = 16,
    copies_mib: Annotated[
        int | None,
        _engine(
            help="Without a C compiler: memory for contiguous copies of keys and values; 0 = none. [default: 256]",
            metavar="INT",
            min=0,
        ),
    ] = None,
    longest: Annotated[int, _engine(help="Tokens of prompt and answer together; 0 = the model's positions.")] = 0,
    most_sequences: Annotated[int, _engine(help="Answers generated at once; 0 = 64 on a CPU, 256 on a GPU.")] = 0,
    most_tokens: Annotated[
        int,
        _engine(
            help="Tokens per step: new ones of all answers, and chunks of prompts; 0 = 512 on a CPU, by speed on a GPU."
        ),
    ] = 0,
    prompt_tokens: Annotated[
        int,
        _engine(
            help="Prompt tokens per step while answers grow; 0 = 128 on a CPU, the rest of --most-tokens on a GPU."
        ),
    ] = 0,
    packed: Annotated[
        bool, _engine(help="On a CPU: copy matrices into the order that products of few rows read.")
    ] = True,
    compiled: Annotated[bool, _engine(help="On a CPU with a C compiler: compiled loops in fp32.")] = True,
    head: Annotated[str, _engine(help="Precision of the head: that of the model (model), or 8 bits: int8.")] = "model",
    cuda_graphs: Annotated[
        str,
        _engine(
            help="On a GPU: launch a step without prompt chunks as one CUDA graph; auto: where possible.",
            metavar="auto|on|off",
        ),
    ] = "auto",
    guess_tokens: Annotated[
        int | None,
        _engine(help="Tokens guessed at once, looked up in the text so far.  [default: none; 8 with --draft]"),
    ] = None,
    guess_ngram: Annotated[
        int | None, _engine(help="With --guess-tokens: longest run of tokens to look up.  [default: 4]")
    ] = None,
    draft: Annotated[
        Path | None,
        _engine(
            help="Small model with the same tokenizer that guesses in place of the look-up.", metavar="RUN_OR_HF_DIR"
        ),
    ] = None,
    record: Annotated[
        Path | None,
        _engine(help="New file that gets a line of numbers per step, for `meshwright report FILE`.", metavar="FILE"),
    ] = None,
    tp: Annotated[int, _engine(help="Processes on this machine that share every layer.")] = 1,
    ep: Annotated[int, _engine(help="Processes among these that experts are spread over, each expert whole.")] = 1,
    max_body_bytes: Annotated[int, _limit(help="Bytes of a request.")] = 2**20,
    max_prompt_tokens: Annotated[int, _limit(help="Tokens of a prompt; 0 = what the model takes.")] = 0,
    max_answer_tokens: Annotated[int, _limit(help="Tokens of a request: prompts x n x max_tokens.")] = 32_768,
    max_n: Annotated[int, _limit(help="Answers per prompt.")] = 16,
    max_queue: Annotated[int, _limit(help="Waiting prompts; then 429.")] = 256,
    max_requests_per_key: Annotated[int, _limit(help="Requests of one key at once; then 429.")] = 512,
    max_adapters: Annotated[int, _limit(help="Adapters of --adapter-dir in memory; then 409.")] = 16,
    max_adapter_rank: Annotated[int, _limit(help="Rank of an adapter of --adapter-dir.")] = 256,
    max_request_seconds: Annotated[float, _limit(help="From a request's arrival to its last token.")] = 600.0,
    stall_seconds: Annotated[float, _limit(help="Cut off a reader that takes nothing for this long.")] = 30.0,
    drain_seconds: Annotated[float, _limit(help="From SIGTERM on, to finish growing answers.")] = 30.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all settings, not only the common ones.")] = False,
) -> None:
    """Answer HTTP requests with a model: /v1/completions, /v1/chat/completions, and a chat page at /."""
    from meshwright.serving.http.server_options import ServerLimits, ServerOptions, read_keys

    keys = (read_keys(api_key_file) if api_key_file else ()) + _environment_key()
    options = ServerOptions(
        host=host, port=port, keys=tuple(dict.fromkeys(keys)), without_key=without_key,
        adapter_folder=adapter_dir,
        limits=ServerLimits(
            max_body_bytes=max_body_bytes, max_prompt_tokens=max_prompt_tokens, max_answer_tokens=max_answer_tokens,
            max_n=max_n, max_queue=max_queue, max_adapters=max_adapters,
            max_adapter_rank=max_adapter_rank, max_requests_per_key=max_requests_per_key,
            max_request_seconds=max_request_seconds, stall_seconds=stall_seconds, drain_seconds=drain_seconds,
        ),
    )  # fmt: skip
    # 4 in the last digit of the mode: every user may read the file. Only a warning, since containers have one user.
    if api_key_file is not None and api_key_file.stat().st_mode & 0o004:
        remedy = f"chmod 600 {api_key_file}"
        print(f"meshwright: {api_key_file} can be read by every user of this machine: {remedy}", file=sys.stderr)
    check_copies(copies_mib, cache_dtype)
    check_guesses(guess_tokens, guess_ngram, draft)
    check_tensor_ranks(tp, ep)
    if record is not None:
        check_new_file(record, "record")

    from meshwright.interface.trained.serving import configuration, run, served_name, server_of
    from meshwright.serving.engine.engine_options import EngineOptions, Graphs
    from meshwright.store.run_folder import check_model

    require("serve", "serve")
    check_model(model, dtype=dtype, checkpoint=checkpoint)
    if draft is not None:
        check_model(draft, dtype=dtype, named="draft")
    called = name or served_name(model)
    adapters = named_adapters(adapter, called)
    # Bind the port once before the model is loaded: a port in use is refused in a second, not after minutes.
    options.listener().close()
    engine = EngineOptions(
        exact=exact, cache_bytes=cache_mib * 2**20, host_cache_bytes=host_cache_mib * 2**20,
        cache_dtype=cast(CacheForm, cache_dtype), block=block,
        copies_bytes=(256 if copies_mib is None else copies_mib) * 2**20, longest=longest,
        memory_share=memory_share, second_layouts=second_layouts, most_sequences=most_sequences,
        most_tokens=most_tokens, prompt_tokens=prompt_tokens,
        packed=packed, compiled=compiled, head=cast(HeadForm, head), cuda_graphs=cast(Graphs, cuda_graphs),
        record=record, on_progress=partial(print, flush=True),
    )  # fmt: skip
    engine = replace(engine, speculation=_speculation(guess_tokens, guess_ngram, draft))  # imports torch

    loaded, sampling = list["TrainedModel"](), dict[str, float]()

    def ready(server: "HttpServer") -> None:
        from meshwright.interface.trained.trained_model import warn_of_missing_template

        warn_of_missing_template(loaded[0])  # not earlier: an error prints one line only
        print(
            f"{server.name} answers at {server.address} ({server.address}/v1 for clients); Ctrl-C ends it", flush=True
        )
        settings = {"tp": tp, "ep": ep, **configuration(server, engine, draft, adapters)}
        lines = in_full(settings) if verbose else in_short(server, settings, sampling)
        print(*lines, sep="\n", flush=True)

    if tp > 1:
        from meshwright.observe.ranks import start_server

        start_server()  # in the main thread, where Ctrl-C can be kept from it
    with ExitStack() as ranks:

        def opened() -> "HostedModel":
            from meshwright.interface.trained.opening import load
            from meshwright.verbs.serve.sharded import sharded_model

            guesses = load(draft, dtype).model if draft else None
            if tp == ep == 1:
                opened_model: TrainedModel | None = load(model, dtype, checkpoint=checkpoint)
            else:
                sharded = sharded_model(model, tp=tp, ep=ep, dtype=dtype, checkpoint=checkpoint)
                opened_model = ranks.enter_context(sharded)
            assert opened_model is not None, "no launcher has started this process"
            loaded.append(opened_model)
            hosted = opened_model.hosted(called, draft=guesses, adapters=adapters, generation_config=generation_config)
            sampling.update(hosted.sampling)
            return hosted

        run(server_of(called, opened, options, engine, ready))


def _speculation(tokens: int | None, ngram: int | None, draft: Path | None) -> "Speculation | None":
    if tokens is None and draft is None:
        return None
    from meshwright.serving.engine.speculation import Speculation

    plain = Speculation()
    return Speculation(tokens=plain.tokens if tokens is None else tokens, ngram=plain.ngram if ngram is None else ngram)


def _environment_key() -> tuple[str, ...]:
    from meshwright.serving.http.server_options import check_key

    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key:
        check_key(key, f"${KEY_VARIABLE}")
    return (key,) if key else ()
