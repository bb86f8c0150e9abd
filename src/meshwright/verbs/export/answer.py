"""Export of a run as a Hugging Face directory or a GGUF file. Checks come before torch is loaded."""

from pathlib import Path

from meshwright.spec.errors import PlanError, argument
from meshwright.spec.plan.plan import RANDOM

WEIGHT_FILES = (".bin", ".pt", ".pth", ".safetensors")
"""Endings of weight files, which no folder should have."""


def check_export(
    source: Path, out: Path, dtype: str | None = None, which: str = "last", *, adapter: bool = False
) -> None:
    """Check all that needs no torch. Raises RunError, ArgumentError, PlanError."""
    from meshwright.store import checkpoint_folder
    from meshwright.store.durable import refuse_nonempty, refuse_unwritable
    from meshwright.store.run_folder import RunFolder, check_checkpoint, check_dtype, check_gguf_path, check_model

    check_dtype(dtype)
    check_checkpoint(which)
    if out.suffix == ".gguf":
        if adapter:
            raise PlanError(
                "--adapter writes PEFT's format, which GGUF does not have: leave --adapter out to export the "
                "merged model"
            )
        check_model(source, checkpoint=which)
        check_gguf_path(out)
    else:
        if not checkpoint_folder.is_checkpoint(source):
            RunFolder.open(source)
        if out.suffix in WEIGHT_FILES:
            raise PlanError(f"OUT {out} is a folder with the name of a file: take {out.with_suffix('')}, or NAME.gguf")
        refuse_nonempty(out, "out")
    refuse_unwritable(out, "out")


def write_gguf_file(
    source: Path, out: Path, dtype: str | None = None, which: str = "last", *, adapter: bool = False
) -> dict[str, object]:
    """Export a run, a checkpoint, a Hugging Face directory or another GGUF file as a GGUF file without codes.

    Its size is known before a byte is written. Raises PlanError for a model that llama.cpp would compute differently.
    """
    from meshwright.compress.gguf_stream import plan_gguf, write_gguf
    from meshwright.compress.original import open_original
    from meshwright.store.durable import report_in_one_line
    from meshwright.training.optimizer.precision import DTYPES

    check_export(source, out, dtype, which, adapter=adapter)
    original = open_original(source, which)
    wanted = DTYPES[dtype] if dtype else original.dtype
    plan = plan_gguf(original, wanted)
    with report_in_one_line(out, argument("out")):
        written = write_gguf(out, original, plan)
    return {"out": out, "bytes": written, "predicted_bytes": plan.bytes, "note": plan.note}


def write_directory(
    source: Path, out: Path, dtype: str | None = None, which: str = "last", *, adapter: bool = False
) -> Path:
    """Export a run or one of its checkpoints, and return the checkpoint taken.

    It holds 256 MiB of weights in memory, or the largest tensor, whichever ranks wrote the checkpoint. `dtype`: None =
    as trained. `adapter`: export only the adapter. Raises RunError or CheckpointError for the source, and HubError for
    a shape that the format cannot hold or a folder that is not empty. Raises PlanError for an unknown dtype or a
    missing adapter.
    """
    import torch

    from meshwright.formats.hub import export_folder
    from meshwright.formats.hub.adapter import export_adapter
    from meshwright.formats.hub.config import GENERATION, TEMPLATE, read_json
    from meshwright.formats.hub.directory import PromptFiles
    from meshwright.store.durable import report_in_one_line
    from meshwright.store.model_weights import final_weights, locate, weights
    from meshwright.store.run_folder import check_dtype
    from meshwright.training.optimizer.precision import DTYPES

    check_dtype(dtype)
    run, checkpoint = locate(source, which)
    wanted = DTYPES[dtype or run.plan.recipe.precision]
    if adapter and run.plan.model.lora is None:
        raise PlanError(f"{run.path} trained all weights and has no adapter: leave --adapter out")
    # An adapter without its base is useless, and random weights are in no folder.
    if adapter and run.plan.init == RANDOM:
        raise PlanError(
            f"{run.path} trained its adapter on random weights, which no folder holds. Leave --adapter "
            "out to export the merged model"
        )
    template = run.path / TEMPLATE
    prompts = PromptFiles(
        tokenizer=run.load_tokenizer(checkpoint),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        generation=read_json(run.path / GENERATION),
    )
    with report_in_one_line(out, argument("out")):
        if adapter:
            tensors = dict(weights(checkpoint, torch.float32, verified=True))
            export_adapter(out, tensors, run.plan.model, base=run.plan.init, dtype=wanted, prompts=prompts)
            return checkpoint
        export_folder(
            out,
            model_tensors=final_weights(run.plan, checkpoint, wanted),
            shape=run.plan.model.base,
            dtype=wanted,
            dropout=run.plan.recipe.dropout,
            tokenizer=prompts.tokenizer,
            chat_template=prompts.chat_template,
            generation=prompts.generation,
        )
    return checkpoint
