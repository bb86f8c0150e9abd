"""A load on the command line, for `plan --serve`."""

from typing import Annotated, Any

import typer

AskedServe = Annotated[
    bool, typer.Option("--serve", help="Plan serving in place of training: memory, concurrency, tokens per second.")
]


def _load(option: str, what: str, default: int) -> Any:
    return typer.Option(option, metavar="INT", help=f"With --serve: {what}. [default: {default}]")


INPUT = "--input-length", "tokens of a prompt"
OUTPUT = "--output-length", "tokens of an answer"
CONCURRENCY = "--concurrency", "requests in flight"
AskedInput = Annotated[int | None, _load(*INPUT, 1024)]
AskedOutput = Annotated[int | None, _load(*OUTPUT, 1024)]
AskedConcurrency = Annotated[int | None, _load(*CONCURRENCY, 64)]
ServedInput = Annotated[int | None, _load(*INPUT, 256)]
"""Of a load that is served here, as compare does."""
ServedOutput = Annotated[int | None, _load(*OUTPUT, 64)]
ServedConcurrency = Annotated[int | None, _load(*CONCURRENCY, 8)]
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
AskedMeasure = Annotated[
    bool,
    typer.Option(
        "--measure", help="With --serve and a file of calibrate: also run the load here; planned, dry run, measured."
    ),
]
