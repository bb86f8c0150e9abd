"""`meshwright export`: write a run as a Hugging Face directory, or as a GGUF file."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import Checkpoint
from meshwright.verbs.export.answer import check_export, write_directory, write_gguf_file


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, or one of its checkpoints; for GGUF any model.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make, new or empty; or a .gguf file.")],
    checkpoint: Checkpoint = "last",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.  [default: as trained]")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export only the adapter of a run with model.lora, in PEFT's format.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON document.")] = False,
) -> None:
    """Write the weights of a run as a Hugging Face directory: config, weights, tokenizer, generation config.

    An adapter is merged into its base weights. An OUT that ends in .gguf is one file for llama.cpp.
    """
    from meshwright.interface.terminal.screen_text import print_json, shown_path

    source = shown_path(run)
    check_export(run, out, dtype, checkpoint, adapter=adapter)
    if out.suffix == ".gguf":
        written = write_gguf_file(run, out, dtype, checkpoint, adapter=adapter)
        if json:
            print_json(written | {"out": shown_path(out)})
        else:
            print(f"{shown_path(out)}: {written['bytes']:,} bytes of {source}, for llama.cpp and what is built on it")
            if written["note"]:
                print(f"tokenizer: {written['note']}")
        return
    exported_checkpoint = write_directory(run, out, dtype, checkpoint, adapter=adapter)
    if json:
        names = sorted(path.name for path in out.iterdir())
        print_json({"out": shown_path(out), "checkpoint": exported_checkpoint, "files": names})
    else:
        readers = "for transformers (v4 and v5) and what reads its directories"
        print(
            f"{shown_path(out)}: {exported_checkpoint.name} of {source}, "
            f"{'its adapter, for PEFT' if adapter else readers}"
        )
