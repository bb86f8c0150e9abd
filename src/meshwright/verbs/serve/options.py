"""Options of `serve` that configure the serving engine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.spec.errors import ArgumentError, argument

ENGINE = "Engine"
"""Panel of the help that lists these options."""
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=DIR",
        help="LoRA adapter that requests name as their model: a PEFT folder, or a run with model.lora. Repeatable.",
    ),
]
AdapterFolder = Annotated[
    Path | None,
    typer.Option(
        "--adapter-dir",
        metavar="DIR",
        help="Let requests load PEFT adapters from this folder, and unload any, while the server runs.",
    ),
]


def _option(name: str, help: str, **settings: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=ENGINE, **settings)


Exact = Annotated[bool, _option("--exact", "Answers do not depend on other requests, to the last bit. On CPUs.")]
Cache = Annotated[
    int,
    _option("--cache-mib", "Memory of the KV cache; 0 = 1024 on a CPU, --memory-share on a GPU.", metavar="INT", min=0),
]
MemoryShare = Annotated[
    float,
    _option(
        "--memory-share",
        "On a GPU: share of the memory left by weights, graphs and one step that the KV cache takes.",
        metavar="SHARE",
    ),
]
SecondLayouts = Annotated[
    bool,
    _option(
        "--second-layouts/--no-second-layouts",
        "On a GPU: also keep 4-bit codes in a second layout, or as 16-bit numbers, where that is faster.",
    ),
]
CacheDtype = Annotated[
    str, _option("--cache-dtype", "Dtype of the KV cache: that of the model (model), or 8 bits: int8, fp8.")
]
HostCache = Annotated[
    int,
    _option(
        "--host-cache-mib",
        "On a GPU: host memory for prefixes evicted from the KV cache; 0 = none.",
        metavar="INT",
        min=0,
    ),
]
Copies = Annotated[
    int | None,
    _option(
        "--copies-mib",
        "Without a C compiler: memory for contiguous copies of keys and values; 0 = none. [default: 256]",
        metavar="INT",
        min=0,
    ),
]
Block = Annotated[int, _option("--block", "Positions per block of the KV cache.")]
MostTokens = Annotated[
    int,
    _option(
        "--most-tokens",
        "Tokens per step: new ones of all answers, and chunks of prompts; 0 = 512 on a CPU, by speed on a GPU.",
    ),
]
PromptTokens = Annotated[
    int,
    _option(
        "--prompt-tokens",
        "Prompt tokens per step while answers grow; 0 = 128 on a CPU, the rest of --most-tokens on a GPU.",
    ),
]
MostSequences = Annotated[int, _option("--most-sequences", "Answers generated at once; 0 = 64 on a CPU, 256 on a GPU.")]
Longest = Annotated[int, _option("--longest", "Tokens of prompt and answer together; 0 = the model's positions.")]
Packed = Annotated[
    bool, _option("--packed/--no-packed", "On a CPU: copy matrices into the order that products of few rows read.")
]
Compiled = Annotated[bool, _option("--compiled/--no-compiled", "On a CPU with a C compiler: compiled loops in fp32.")]
Head = Annotated[str, _option("--head", "Precision of the head: that of the model (model), or 8 bits: int8.")]
GuessTokens = Annotated[
    int | None,
    _option("--guess-tokens", "Tokens guessed at once, looked up in the text so far.  [default: none; 8 with --draft]"),
]
GuessNgram = Annotated[
    int | None, _option("--guess-ngram", "With --guess-tokens: longest run of tokens to look up.  [default: 4]")
]
Draft = Annotated[
    Path | None,
    _option(
        "--draft", "Small model with the same tokenizer that guesses in place of the look-up.", metavar="RUN_OR_HF_DIR"
    ),
]
CudaGraphs = Annotated[
    str,
    _option(
        "--cuda-graphs",
        "On a GPU: launch a step without prompt chunks as one CUDA graph; auto: where possible.",
        metavar="auto|on|off",
    ),
]
TensorRanks = Annotated[int, _option("--tp", "Processes on this machine that share every layer.")]
ExpertRanks = Annotated[int, _option("--ep", "Processes among these that experts are spread over, each expert whole.")]


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
