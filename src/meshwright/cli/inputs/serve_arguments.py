"""A load on the command line, for `plan --serve`."""

from typing import Annotated

import typer

AskedServe = Annotated[
    bool, typer.Option("--serve", help="Plan serving in place of training: memory, concurrency, tokens per second.")
]
AskedInput = Annotated[
    int | None,
    typer.Option(
        "--input-length", metavar="INT", help="With --serve: tokens of a prompt. [default: 1024; 256 of compare]"
    ),
]
AskedOutput = Annotated[
    int | None,
    typer.Option(
        "--output-length", metavar="INT", help="With --serve: tokens of an answer. [default: 1024; 64 of compare]"
    ),
]
AskedConcurrency = Annotated[
    int | None,
    typer.Option("--concurrency", metavar="INT", help="With --serve: requests in flight. [default: 64; 8 of compare]"),
]
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
        "--adapter-targets", metavar="NAMES", help="With --adapters: as model.lora.targets. [default: all]",
        show_default=False,
    ),
]  # fmt: skip
AskedMeasure = Annotated[
    bool,
    typer.Option(
        "--measure", help="With --serve and a file of calibrate: also run the load here; planned, dry run, measured."
    ),
]
