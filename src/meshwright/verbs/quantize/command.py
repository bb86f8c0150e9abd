"""`meshwright quantize MODEL --scheme NAME -o OUT`: fewer bits per weight, and their cost in quality."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import Checkpoint, ModelPath
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.model.quantization_schemes import CALIBRATED, SCHEMES
from meshwright.spec.weights.gguf_schemes import GGUF_SCHEMES


def _names(*, calibrated: bool) -> str:
    return ", ".join(name for name, scheme in SCHEMES.items() if (scheme.method in CALIBRATED) == calibrated)


def quantize(
    model: ModelPath,
    scheme: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{_names(calibrated=False)}; with text: {_names(calibrated=True)}; "
            f"of GGUF: {', '.join(GGUF_SCHEMES)}.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to make, or .gguf file.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="meshwright; compressed-tensors, gptq, awq or bitsandbytes for others; gguf."
        ),
    ] = "meshwright",
    group: Annotated[
        int | None, typer.Option(help="Inputs that share a scale: 16 to 256.  [default: the scheme's]")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Matrices to leave unquantized, as 'layers.0.*'. Repeatable."),
    ] = None,
    outliers: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="Outliers of llm-int8 schemes: calibrated, or by threshold in each batch.  [calibrated]",
        ),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Activations above it are outliers.  [default: 6]")] = None,
    zero_point: Annotated[
        str | None,
        typer.Option(metavar="SIDE", help="Zeros of zero-point schemes: both, weights or activations.  [both]"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Text to calibrate and measure on.  [the run's own]")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Windows of it to score.")] = 64,
    calibration: Annotated[int, typer.Option(help="Windows of it for int8-smooth, awq and gptq to read.")] = 128,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of all files, as 1.2GiB: each matrix gets 3 to 8 bits.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="KL limit in nats per token; above it exit code 4.  [default: the scheme's]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of unquantized weights: fp32, bf16 or fp16.  [default: as stored]")
    ] = None,
    checkpoint: Checkpoint = "last",
    quality: Annotated[bool, typer.Option(help="Compare both models on held-out text.")] = True,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write one page, for a browser offline.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Quantize the matrices of a model and compare it with the original on held-out text.

    Embeddings, head, norms, biases and routers stay as they are. generate, eval and meshwright.load read the folder.
    Exit code 4 where the predictions moved further than --max-kl; the folder is written all the same.
    """
    from meshwright.interface.answers.answer import check_page, write_page
    from meshwright.interface.terminal.screen_text import console, print_answer, shown_path
    from meshwright.verbs.quantize.options import check_request
    from meshwright.verbs.quantize.screen import lines

    if html is not None:
        check_page(html, "quality.html", "html")
        if html.resolve() == out.resolve():
            raise ArgumentError("html", html, f"is the same file as {argument('out')}", "name another")
    check_request(
        model, out, scheme, format=format, group=group, outliers=outliers, threshold=threshold, zero_point=zero_point,
        data=data, sequences=sequences, calibration=calibration, budget=budget, max_kl=max_kl, dtype=dtype,
        checkpoint=checkpoint,
    )  # fmt: skip
    from meshwright.verbs.quantize.answer import quantize as quantize_model  # loads torch

    with console(json=True).status("quantize") as status:

        def on_block(block: int, blocks: int) -> None:
            status.update(f"quantize: block {block} of {blocks}")

        answer = quantize_model(
            model, scheme, out, format=format, group=group, keep=keep or (), outliers=outliers, threshold=threshold,
            zero_point=zero_point, data=data, sequences=sequences, calibration=calibration, budget=budget,
            max_kl=max_kl, dtype=dtype, checkpoint=checkpoint, quality=quality, histograms=html is not None,
            on_block=on_block,
        )  # fmt: skip
    print_answer(answer, lines(answer), json=json)
    if html is not None:  # after the answer is printed: a full disk must not lose it
        write_page(html, answer.page())
        if not json:
            print(f"\n  {shown_path(html)}: open it in a browser")
    answer.check()
