"""Opening a trained model: a run, a checkpoint, a Hugging Face directory, an adapter, or a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.compress.original import gguf_tokenizer, is_gguf_path, save_tokenizer
from meshwright.data import Tokenizer
from meshwright.formats.hub import HubFolder, import_folder
from meshwright.formats.hub.adapter import base_folder, load_adapter
from meshwright.formats.quantized.detection import is_quantized
from meshwright.formats.quantized.folder import decoded_parts, open_quantized
from meshwright.formats.quantized.interface import fill
from meshwright.interface.answers.answer import Place, checked, folder_of
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.model import Transformer, build
from meshwright.model.low_rank import merge_adapter
from meshwright.model.transformer import build_quantized, skeleton
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import adapter_parts
from meshwright.store import checkpoint_folder
from meshwright.store.model_weights import final_weights, locate, open_base
from meshwright.store.run_folder import AUTO, LAST, RunFolder, check_model, ids_of
from meshwright.training.device import pick_device
from meshwright.training.optimizer.precision import DTYPES

if TYPE_CHECKING:
    from meshwright.formats.gguf.model import GGUFModel

Put = Callable[[str, Tensor], object]
"""Stores a whole weight by its name."""
Allocate = Callable[[ModelShape, torch.dtype], tuple[Transformer, Put]]
"""Allocates a model of a shape, or this rank's part of it, and returns it with its `Put`."""


@checked
def load(path: Place, dtype: str | None = AUTO, *, checkpoint: str = LAST) -> TrainedModel:
    """Open a trained model.

    Args:
        path: A run folder, one of its checkpoints, a Hugging Face directory, a GGUF file, an adapter in PEFT's
            format, or the answer of `train`.
        dtype: fp32, bf16 or fp16. None = as trained or stored; auto = the same on a GPU, and fp32 on a CPU, whose loops
            are made for it. fp32 of a run in lower precision gives its master weights.
        checkpoint: Checkpoint of a run: last, best (lowest held-out loss), or a step.

    Raises:
        RunError: The path is neither a run nor a model.
        CheckpointError, HubError: It is damaged.
    """
    return opened(folder_of(path, checkpoint), dtype, checkpoint, _allocate_whole)


def opened(path: Path, dtype: str | None, checkpoint: str, allocate: Allocate) -> TrainedModel:
    """Open a trained model as `load`, into memory that `allocate` provides."""
    kind = check_model(path, dtype=dtype, checkpoint=checkpoint)
    dtype = dtype_on(pick_device()) if dtype == AUTO else dtype
    if kind == "run":
        return _open_run(path, dtype, checkpoint, allocate)
    if kind == "folder":
        return _open_quantized(path, dtype) if is_quantized(path) else _open_hub(path, dtype, allocate)
    return _open_gguf(path, dtype, allocate) if kind == "gguf" else _open_hub(base_folder(path), dtype, allocate, path)


def dtype_on(device: torch.device) -> str | None:
    """Return the dtype that `auto` means. None = as stored."""
    return "fp32" if device.type == "cpu" else None


def _allocate_whole(shape: ModelShape, dtype: torch.dtype) -> tuple[Transformer, Put]:
    model = build(shape, dtype=dtype, device=pick_device(), initialize=False)
    parameters = model.state_dict()
    return model, lambda name, tensor: parameters[name].copy_(tensor)


def _open_run(path: Path, dtype: str | None, which: str, allocate: Allocate) -> TrainedModel:
    run, checkpoint = locate(path, which)
    # In fp32 the weights of a 16-bit run come from its masters, which hold more digits.
    wanted = DTYPES[dtype or run.plan.recipe.precision]
    model, put = allocate(run.plan.model.base, wanted)
    for name, tensor in final_weights(run.plan, checkpoint, wanted):
        put(name, tensor)
    return _trained_run(run, checkpoint, model, path)


def described(path: Path, checkpoint: str = LAST) -> TrainedModel:
    """Open a model as `load`, without memory for its weights: for its shape, tokenizer and text.

    Takes a run folder, one of its checkpoints, a Hugging Face directory or a GGUF file. Raises as `load`.
    """
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_checkpoint(path):
        run, checkpoint_path = locate(path, checkpoint)
        return _trained_run(run, checkpoint_path, skeleton(run.plan.model.base), path)
    if is_gguf_path(path):
        from meshwright.formats.gguf.model import open_gguf

        opened = open_gguf(path)
        return _trained_gguf(opened, skeleton(opened.shape))
    folder = import_folder(path)
    return _trained_hub(skeleton(folder.shape), folder, path)


def _trained_run(run: RunFolder, checkpoint: Path, model: Transformer, path: Path) -> TrainedModel:
    tokenizer = run.load_tokenizer(checkpoint)
    return TrainedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        tokenizer_file=str(run.tokenizer),
        plan=run.plan,
        stop_ids=tuple(dict.fromkeys((*(() if tokenizer.eos is None else (tokenizer.eos,)), *run.end_ids()))),
        generation=run.generation,
        path=path,
    )


def _open_quantized(path: Path, dtype: str | None) -> TrainedModel:
    """Open a quantized folder. `dtype`: of activations and of unquantized weights."""
    folder = import_folder(path, quantized=True)
    quantized = open_quantized(folder)
    wanted = DTYPES[dtype] if dtype else folder.dtype
    model = build_quantized(
        folder.shape, quantized.schemes, outlier_columns=quantized.outlier_columns, dtype=wanted, device=pick_device()
    )
    fill(model, decoded_parts(path, quantized))
    return _trained_hub(model, folder, path)


def _open_gguf(path: Path, dtype: str | None, allocate: Allocate) -> TrainedModel:
    """Open a GGUF file. Codes are restored in fp32 and cast."""
    from meshwright.formats.gguf.model import open_gguf

    gguf = open_gguf(path)
    wanted = DTYPES[dtype] if dtype else gguf.dtype
    model, put = allocate(gguf.shape, wanted)
    for name, tensor in gguf.weights(torch.float32):
        put(name, tensor)
    return _trained_gguf(gguf, model)


def _trained_gguf(gguf: "GGUFModel", model: Transformer) -> TrainedModel:
    tokenizer = gguf_tokenizer(gguf)
    return TrainedModel(
        model=model.eval(), tokenizer=tokenizer, tokenizer_file=save_tokenizer(tokenizer) if tokenizer else "",
        plan=None, stop_ids=gguf.vocabulary.stop_ids if gguf.vocabulary else (), path=gguf.path,
    )  # fmt: skip


def _trained_hub(model: Transformer, folder: HubFolder, path: Path) -> TrainedModel:
    return TrainedModel(
        model=model.eval(),
        tokenizer=Tokenizer.load(folder.tokenizer) if folder.tokenizer else None,
        tokenizer_file=str(folder.tokenizer or ""),
        plan=None,
        stop_ids=ids_of(folder.generation.get("eos_token_id")),
        generation=folder.generation,
        path=path,
    )


def _open_hub(path: Path, dtype: str | None, allocate: Allocate, adapter: Path | None = None) -> TrainedModel:
    """Open a Hugging Face directory. `adapter`: a folder in PEFT's format, merged into the weights as they come."""
    base = open_base(path)
    base.check()
    folder = base.hub
    shape, low = (folder.shape, dict[str, Tensor]()) if adapter is None else load_adapter(adapter, folder.shape)
    model, put = allocate(folder.shape, DTYPES[dtype] if dtype else folder.dtype)

    for name, weight in base.weights():
        tensor = weight if isinstance(weight, Tensor) else weight.dequantized()
        # Merged weight by weight, so that no second copy of the model is ever in memory.
        parts = adapter_parts(name, low)
        put(name, merge_adapter(tensor.float(), parts, shape.lora) if parts and shape.lora else tensor)
    return _trained_hub(model, folder if adapter is None else folder.prompted_by(adapter), adapter or path)
