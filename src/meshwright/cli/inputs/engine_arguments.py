"""Options of `serve` that configure the serving engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshwright.spec.errors import ArgumentError

ENGINE = "Engine"
"""Panel of the help that lists these options."""

Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="Answers do not depend on other requests, to the last bit. On CPUs.", rich_help_panel=ENGINE
    ),
]  # fmt: skip
Cache = Annotated[
    int,
    typer.Option(
        "--cache-mib", metavar="INT", min=0,
        help="Memory of the KV cache; 0 = 1024 on a CPU, --memory-share on a GPU.", rich_help_panel=ENGINE
    ),
]  # fmt: skip
MemoryShare = Annotated[
    float,
    typer.Option(
        "--memory-share", metavar="SHARE",
        help="On a GPU: share of the memory left by weights, graphs and one step that the KV cache takes.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
SecondLayouts = Annotated[
    bool,
    typer.Option(
        "--second-layouts/--no-second-layouts",
        help="On a GPU: also keep 4-bit codes in a second layout, or as 16-bit numbers, where that is faster.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
CacheDtype = Annotated[
    str,
    typer.Option(
        "--cache-dtype", help="Dtype of the KV cache: that of the model (model), or 8 bits: int8, fp8.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
HostCache = Annotated[
    int,
    typer.Option(
        "--host-cache-mib",
        metavar="INT",
        min=0,
        help="On a GPU: host memory for prefixes evicted from the KV cache; 0 = none.",
        rich_help_panel=ENGINE,
    ),
]
Copies = Annotated[
    int | None,
    typer.Option(
        "--copies-mib",
        metavar="INT",
        min=0,
        help="Without a C compiler: memory for contiguous copies of keys and values; 0 = none. [default: 256]",
        rich_help_panel=ENGINE,
    ),
]
Block = Annotated[
    int, typer.Option("--block", help="Positions per block of the KV cache.", rich_help_panel=ENGINE)
]  # fmt: skip
MostTokens = Annotated[
    int,
    typer.Option(
        "--most-tokens",
        help="Tokens per step: new ones of all answers, and chunks of prompts; 0 = 512 on a CPU, by speed on a GPU.",
        rich_help_panel=ENGINE,
    ),
]
PromptTokens = Annotated[
    int,
    typer.Option(
        "--prompt-tokens",
        help="Prompt tokens per step while answers grow; 0 = 128 on a CPU, the rest of --most-tokens on a GPU.",
        rich_help_panel=ENGINE,
    ),
]
MostSequences = Annotated[
    int,
    typer.Option(
        "--most-sequences", help="Answers generated at once; 0 = 64 on a CPU, 256 on a GPU.", rich_help_panel=ENGINE
    ),
]
Longest = Annotated[
    int,
    typer.Option(
        "--longest", help="Tokens of prompt and answer together; 0 = the model's positions.", rich_help_panel=ENGINE
    ),
]  # fmt: skip
Packed = Annotated[
    bool,
    typer.Option(
        "--packed/--no-packed", help="On a CPU: copy matrices into the order that products of few rows read.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled/--no-compiled", help="On a CPU with a C compiler: compiled loops in fp32.", rich_help_panel=ENGINE
    ),
]
Head = Annotated[
    str,
    typer.Option(
        "--head", help="Precision of the head: that of the model (model), or 8 bits: int8.", rich_help_panel=ENGINE
    ),
]
GuessTokens = Annotated[
    int | None,
    typer.Option(
        "--guess-tokens",
        help="Tokens guessed at once, looked up in the text so far.  [default: none; 8 with --draft]",
        rich_help_panel=ENGINE,
    ),
]
GuessNgram = Annotated[
    int | None,
    typer.Option(
        "--guess-ngram", help="With --guess-tokens: longest run of tokens to look up.  [default: 4]",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
Draft = Annotated[
    Path | None,
    typer.Option(
        "--draft", metavar="RUN_OR_HF_DIR",
        help="Small model with the same tokenizer that guesses in place of the look-up.", rich_help_panel=ENGINE,
    ),
]  # fmt: skip
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs", metavar="auto|on|off",
        help="On a GPU: launch a step without prompt chunks as one CUDA graph; auto: where possible.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
TensorRanks = Annotated[
    int, typer.Option("--tp", help="Processes on this machine that share every layer.", rich_help_panel=ENGINE)
]
ExpertRanks = Annotated[
    int,
    typer.Option(
        "--ep", help="Processes among these that experts are spread over, each expert whole.", rich_help_panel=ENGINE
    ),
]
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


def named_adapters(words: Sequence[str] | None, model: str) -> dict[str, Path]:
    """Return {name: folder} of NAME=DIR words.

    Raises ArgumentError for a malformed word, a missing folder, or a name that is taken, as `model` is.
    """
    folders: dict[str, Path] = {}
    for word in words or ():
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ArgumentError(f'adapter="{word}" must be NAME=DIR: the name that requests use, and a folder')
        if name in folders or name == model:
            raise ArgumentError(f'adapter="{word}": the name {name} is taken; give each adapter its own')
        if not Path(folder).is_dir():
            raise ArgumentError(f'adapter="{word}" does not exist: give NAME=FOLDER')
        folders[name] = Path(folder)
    return folders


def check_tensor_ranks(tp: int, ep: int) -> None:
    """Raise ArgumentError unless `tp` processes can share a model and spread experts over `ep` of them."""
    for name, ranks in (("tp", tp), ("ep", ep)):
        if ranks < 1:
            raise ArgumentError(f"{name}={ranks} must be at least 1")
    if ep > 1 and tp == 1:
        raise ArgumentError(f"ep={ep} spreads experts over the processes of tp, and there is one: add tp={ep}")


def check_guesses(tokens: int | None, ngram: int | None, draft: Path | None) -> None:
    """Raise ArgumentError for options of guesses that contradict each other or are out of range."""
    for name, number, least in (("guess_tokens", tokens, 1), ("guess_ngram", ngram, 2)):
        if number is not None and number < least:
            raise ArgumentError(f"{name}={number} must be at least {least}")
    if draft is not None and ngram is not None:
        raise ArgumentError(
            f"guess_ngram={ngram} has no effect with draft={draft}, which guesses instead of a look-up: leave one out"
        )
    if ngram is not None and tokens is None:
        raise ArgumentError(f"guess_ngram={ngram} has no effect without guesses: add guess_tokens=8")


def check_copies(mib: int | None, cache_dtype: str) -> None:
    """Raise ArgumentError when copies are requested for an 8-bit cache, which has none."""
    if mib and cache_dtype != "model":
        raise ArgumentError(
            f"copies_mib={mib} has no effect with cache_dtype={cache_dtype}: leave copies_mib out, or take "
            "cache_dtype=model"
        )
