"""A served load on the command line, for `plan --serve`, `rent --serve` and `compare --serve`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from meshwright.spec.errors import PlanError

AskedServe = Annotated[
    bool, typer.Option("--serve", help="Plan serving instead of training: memory, concurrency, tokens per second.")
]
INPUT = "--input-length", "tokens of a prompt"
OUTPUT = "--output-length", "tokens of an answer"
CONCURRENCY = "--concurrency", "requests in flight"
AskedQuantization = Annotated[
    str,
    typer.Option(
        "--quantization", metavar="NAME",
        help="With --serve: weights as bf16, fp8, nvfp4, int4_wo, or a scheme of quantize. [default: bf16]",
        show_default=False,
    ),
]  # fmt: skip
AskedKv = Annotated[
    str,
    typer.Option(
        "--kv-dtype", metavar="NAME", help="With --serve: keys and values as bf16, fp8, int8 or fp32. [default: bf16]",
        show_default=False,
    ),
]  # fmt: skip
AskedFramework = Annotated[
    str,
    typer.Option(
        "--framework", metavar="NAME", help="With --serve: vllm, sglang, trtllm or meshwright. [default: vllm]",
        show_default=False,
    ),
]  # fmt: skip
AskedAdapters = Annotated[
    int | None,
    typer.Option("--adapters", metavar="INT", help="With --serve: LoRA adapters beside the model. [default: 0]"),
]
AskedAdapterRank = Annotated[
    int | None, typer.Option("--adapter-rank", metavar="INT", help="With --adapters: rank of each. [default: 16]")
]
AskedAdapterTargets = Annotated[
    str,
    typer.Option(
        "--adapter-targets", metavar="NAMES", help="With --adapters: matrices, as model.lora.targets. [default: all]",
        show_default=False,
    ),
]  # fmt: skip
AskedMeasure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="With --serve and a file of calibrate: also run the load here, and print planned, dry run and measured.",
    ),
]


def _load_option(name: str, meaning: str, default: int) -> Any:
    return typer.Option(name, metavar="INT", help=f"With --serve: {meaning}. [default: {default}]")


AskedInput = Annotated[int | None, _load_option(*INPUT, 1024)]
AskedOutput = Annotated[int | None, _load_option(*OUTPUT, 1024)]
AskedConcurrency = Annotated[int | None, _load_option(*CONCURRENCY, 64)]
ServedInput = Annotated[int | None, _load_option(*INPUT, 256)]
"""The options of compare, which serves the load on this machine."""
ServedOutput = Annotated[int | None, _load_option(*OUTPUT, 64)]
ServedConcurrency = Annotated[int | None, _load_option(*CONCURRENCY, 8)]


def refuse_load(load: Mapping[str, str | int | None]) -> None:
    """Raise PlanError for options of a load without --serve."""
    option = next((name for name, setting in load.items() if setting not in ("", None)), None)
    if option:
        raise PlanError(f"--{option.replace('_', '-')} is for serving: add --serve")
