"""How a serving engine uses its machine, on the command line of `serve`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshwright.spec.errors import ArgumentError

ENGINE = "Engine"
"""Under which the help of a verb lists them."""

Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="An answer's bits depend on its own request alone. For CPUs.", rich_help_panel=ENGINE
    ),
]  # fmt: skip
Cache = Annotated[
    int,
    typer.Option(
        "--cache-mib", metavar="INT", min=0,
        help="Most memory of keys and values; 0 = 1024 on a CPU, and --memory-share on a GPU.", rich_help_panel=ENGINE
    ),
]  # fmt: skip
MemoryShare = Annotated[
    float,
    typer.Option(
        "--memory-share", metavar="SHARE",
        help="On a GPU, of the memory that is free beside weights, graphs and a step: what keys and values take.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
SecondLayouts = Annotated[
    bool,
    typer.Option(
        "--second-layouts/--no-second-layouts",
        help="On a GPU, 4-bit codes may lie in memory a second time, or as 16-bit numbers, where that is faster.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
CacheDtype = Annotated[
    str,
    typer.Option(
        "--cache-dtype", help="Keys and values as the model's numbers (model), or in 8 bits: int8, fp8.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
HostCache = Annotated[
    int,
    typer.Option(
        "--host-cache-mib",
        metavar="INT",
        min=0,
        help="Of a model on a GPU: most host memory for cached prefixes that had to make way; 0 = none.",
        rich_help_panel=ENGINE,
    ),
]
Copies = Annotated[
    int | None,
    typer.Option(
        "--copies-mib",
        metavar="INT",
        min=0,
        help="Without a C compiler: most memory of second copies of keys and values, in one piece each; 0 = none. "
        "[default: 256]",
        rich_help_panel=ENGINE,
    ),
]
Block = Annotated[
    int, typer.Option("--block", help="Positions of a block of the cache.", rich_help_panel=ENGINE)
]  # fmt: skip
MostTokens = Annotated[
    int,
    typer.Option(
        "--most-tokens",
        help="Of a step: new tokens of all answers, and chunks of prompts; 0 = 512 on a CPU, on a GPU by its products.",
        rich_help_panel=ENGINE,
    ),
]
PromptTokens = Annotated[
    int,
    typer.Option(
        "--prompt-tokens",
        help="Of prompts, in a step in which answers grow; 0 = 128 on a CPU, all there is room for on a GPU.",
        rich_help_panel=ENGINE,
    ),
]
MostSequences = Annotated[
    int,
    typer.Option(
        "--most-sequences", help="Answers that are made at once; 0 = 64 on a CPU, 256 on a GPU.", rich_help_panel=ENGINE
    ),
]
Longest = Annotated[
    int,
    typer.Option(
        "--longest", help="Most tokens of prompt and answer; 0 = the model's positions.", rich_help_panel=ENGINE
    ),
]  # fmt: skip
Packed = Annotated[
    bool,
    typer.Option(
        "--packed/--no-packed", help="On a CPU, copies of matrices in the order in which few rows read them.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled/--no-compiled", help="On a CPU with a C compiler, compiled loops in fp32.", rich_help_panel=ENGINE
    ),
]
Head = Annotated[
    str,
    typer.Option(
        "--head", help="The head multiplies as the model does (model), or in 8 bits: int8.", rich_help_panel=ENGINE
    ),
]
GuessTokens = Annotated[
    int | None,
    typer.Option(
        "--guess-tokens",
        help="Most tokens that are guessed at once, from what stood before.  [default: none; 8 with --draft]",
        rich_help_panel=ENGINE,
    ),
]
GuessNgram = Annotated[
    int | None,
    typer.Option(
        "--guess-ngram", help="With --guess-tokens: tokens of the longest run that is looked up.  [default: 4]",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
Draft = Annotated[
    Path | None,
    typer.Option(
        "--draft", metavar="RUN_OR_HF_DIR",
        help="A small model with the same tokenizer guesses, in place of the look-up.", rich_help_panel=ENGINE,
    ),
]  # fmt: skip
CudaGraphs = Annotated[
    str,
    typer.Option(
        "--cuda-graphs", metavar="auto|on|off",
        help="On a GPU, launch a step without chunks of prompts in one call; auto: where it can be.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
TensorRanks = Annotated[
    int, typer.Option("--tp", help="Processes of this machine that share every layer.", rich_help_panel=ENGINE)
]
ExpertRanks = Annotated[
    int, typer.Option("--ep", help="Over how many of them experts are spread, each whole.", rich_help_panel=ENGINE)
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=DIR",
        help="A LoRA adapter, which requests name as their model: of PEFT, or a run with model.lora. For each one.",
    ),
]
AdapterFolder = Annotated[
    Path | None,
    typer.Option(
        "--adapter-dir",
        metavar="DIR",
        help="Let requests load adapters in PEFT's format from here while the server runs, and unload any.",
    ),
]
OneAdapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="A LoRA adapter that answers have: of PEFT, or a run with model.lora.",
    ),
]


def check_adapter(adapter: Path | None) -> None:
    """ArgumentError where there is no such folder."""
    if adapter is not None and not adapter.is_dir():
        raise ArgumentError(
            f"adapter={adapter} does not exist: give a folder of PEFT or of `meshwright export --adapter`, or "
            "a run with model.lora"
        )


def named_adapters(words: Sequence[str] | None, model: str) -> dict[str, Path]:
    """Names and folders of NAME=DIR; `model` has a name already. ArgumentError."""
    found: dict[str, Path] = {}
    for word in words or ():
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ArgumentError(f'adapter="{word}" must be NAME=DIR: the name that requests say, and its folder')
        if name in found or name == model:
            raise ArgumentError(f'adapter="{word}": {name} is named already; give each another name')
        if not Path(folder).is_dir():
            raise ArgumentError(f'adapter="{word}" does not exist: give NAME=FOLDER')
        found[name] = Path(folder)
    return found


def check_tensor_ranks(tp: int, ep: int) -> None:
    """ArgumentError where processes cannot share a model so."""
    for name, ranks in (("tp", tp), ("ep", ep)):
        if ranks < 1:
            raise ArgumentError(f"{name}={ranks} must be at least 1")
    if ep > 1 and tp == 1:
        raise ArgumentError(f"ep={ep} spreads experts over the processes of tp, and there is one: add tp={ep}")


def check_guesses(tokens: int | None, ngram: int | None, draft: Path | None) -> None:
    """ArgumentError where options of guesses contradict each other, or make no sense."""
    for name, value, least in (("guess_tokens", tokens, 1), ("guess_ngram", ngram, 2)):
        if value is not None and value < least:
            raise ArgumentError(f"{name}={value} must be at least {least}")
    if draft is not None and ngram is not None:
        raise ArgumentError(
            f"guess_ngram={ngram} has no effect with draft={draft}, which guesses instead of a look-up: leave one out"
        )
    if ngram is not None and tokens is None:
        raise ArgumentError(f"guess_ngram={ngram} has no effect without guesses: add guess_tokens=8")


def check_copies(mib: int | None, cache_dtype: str) -> None:
    """ArgumentError where copies were asked for and there are none."""
    if mib and cache_dtype != "model":
        raise ArgumentError(
            f"copies_mib={mib} has no effect with cache_dtype={cache_dtype}: leave copies_mib out, or take "
            "cache_dtype=model"
        )
