"""Opening a trained model: a run, a checkpoint, a Hugging Face directory, an adapter, or a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.api.arguments import Place, checked, folder_of
from meshwright.api.trained_model import TrainedModel
from meshwright.compress.gguf_reading import gguf_tokenizer, is_gguf_path, kept_tokenizer
from meshwright.data import Tokenizer
from meshwright.model import Transformer, build
from meshwright.model.hub import HubFolder, import_folder
from meshwright.model.hub.adapter import base_folder, load_adapter
from meshwright.model.low_rank import merged
from meshwright.model.quantized_formats.folder_format import fill
from meshwright.model.quantized_formats.folder_quantization import is_quantized
from meshwright.model.quantized_formats.quantized_folder import decoded_parts, open_quantized
from meshwright.model.transformer import build_quantized, skeleton
from meshwright.spec.inventory import adapter_parts
from meshwright.spec.shape import ModelShape
from meshwright.store import checkpoint_folder
from meshwright.store.base_weights import open_base
from meshwright.store.model_place import AUTO, LAST, check_model
from meshwright.store.model_weights import final_weights, locate
from meshwright.store.run_folder import RunFolder, ids_of
from meshwright.training.device import pick_device
from meshwright.training.precision import DTYPES

if TYPE_CHECKING:
    from meshwright.model.gguf.gguf_model import GGUFModel

Put = Callable[[str, Tensor], object]
"""Takes a whole weight by its name."""
Placing = Callable[[ModelShape, torch.dtype], tuple[Transformer, Put]]
"""Makes a model of a shape, or this rank's part of it, and what fills its weights in."""


@checked
def load(path: Place, dtype: str | None = AUTO, *, checkpoint: str = LAST) -> TrainedModel:
    """A trained model, its weights in `dtype`: fp32, bf16, fp16; None = as they were trained or stored; auto = the same
    on a GPU, and on a CPU fp32, which its loops are made for. `path`: a run folder, one of its checkpoints,
    a Hugging Face directory, a GGUF file, an adapter in PEFT's format, or the answer of `train`.
    `checkpoint` of a run: last, best (of the lowest held-out loss), or the number of a step.

    fp32 of a run in less are its master weights. RunError where `path` is neither run nor directory; CheckpointError
    or HubError where it is damaged.
    """
    return opened(folder_of(path), dtype, checkpoint, _whole)


def opened(path: Path, dtype: str | None, checkpoint: str, place: Placing) -> TrainedModel:
    """As `load`, into a model that `place` makes."""
    kind = check_model(path, dtype=dtype, checkpoint=checkpoint)
    dtype = dtype_on(pick_device()) if dtype == AUTO else dtype
    if kind == "run":
        return _open_run(path, dtype, checkpoint, place)
    if kind == "folder":
        return _open_quantized(path, dtype) if is_quantized(path) else _open_hub(path, dtype, place)
    return _open_gguf(path, dtype, place) if kind == "gguf" else _open_hub(base_folder(path), dtype, place, path)


def dtype_on(device: torch.device) -> str | None:
    """What `auto` is; None = as stored."""
    return "fp32" if device.type == "cpu" else None


def _whole(shape: ModelShape, dtype: torch.dtype) -> tuple[Transformer, Put]:
    model = build(shape, dtype=dtype, device=pick_device(), initialize=False)
    places = model.state_dict()
    return model, lambda name, tensor: places[name].copy_(tensor)


def _open_run(path: Path, dtype: str | None, which: str, place: Placing) -> TrainedModel:
    run, checkpoint = locate(path, which)
    wanted = DTYPES[dtype or run.plan.recipe.precision]
    model, put = place(run.plan.model.base, wanted)
    for name, tensor in final_weights(run.plan, checkpoint, wanted):
        put(name, tensor)
    return _of_run(run, checkpoint, model, path)


def described(path: Path, checkpoint: str = LAST) -> TrainedModel:
    """A run folder, one of its checkpoints, a Hugging Face directory or a GGUF file as `load` finds it, with a model
    that has no memory: for its shape, tokenizer and text. Errors as `load`."""
    if (path / "plan.yaml").is_file() or checkpoint_folder.is_one(path):
        run, found = locate(path, checkpoint)
        return _of_run(run, found, skeleton(run.plan.model.base), path)
    if is_gguf_path(path):
        from meshwright.model.gguf.gguf_model import open_gguf

        opened = open_gguf(path)
        return _of_gguf(opened, skeleton(opened.shape))
    folder = import_folder(path)
    return _with_tokenizer(skeleton(folder.shape), folder, path)


def _of_run(run: RunFolder, checkpoint: Path, model: Transformer, path: Path) -> TrainedModel:
    tokenizer = run.known_tokenizer(checkpoint)
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
    """`dtype` is that of activations, and of what is not quantized."""
    folder = import_folder(path, quantized=True)
    found = open_quantized(folder)
    wanted = DTYPES[dtype] if dtype else folder.dtype
    model = build_quantized(
        folder.shape, found.schemes, outlier_columns=found.outlier_columns, dtype=wanted, device=pick_device()
    )
    fill(model, decoded_parts(path, found))
    return _with_tokenizer(model, folder, path)


def _open_gguf(path: Path, dtype: str | None, place: Placing) -> TrainedModel:
    """Codes are restored in fp32 and cast."""
    from meshwright.model.gguf.gguf_model import open_gguf

    found = open_gguf(path)
    wanted = DTYPES[dtype] if dtype else found.dtype
    model, put = place(found.shape, wanted)
    for name, tensor in found.weights(torch.float32):
        put(name, tensor)
    return _of_gguf(found, model)


def _of_gguf(found: "GGUFModel", model: Transformer) -> TrainedModel:
    tokenizer = gguf_tokenizer(found)
    return TrainedModel(
        model=model.eval(), tokenizer=tokenizer, tokenizer_file=kept_tokenizer(tokenizer) if tokenizer else "",
        plan=None, stop_ids=found.vocabulary.stop_ids if found.vocabulary else (), path=found.path,
    )  # fmt: skip


def _with_tokenizer(model: Transformer, folder: HubFolder, path: Path) -> TrainedModel:
    return TrainedModel(
        model=model.eval(),
        tokenizer=Tokenizer.load(folder.tokenizer) if folder.tokenizer else None,
        tokenizer_file=str(folder.tokenizer or ""),
        plan=None,
        stop_ids=ids_of(folder.generation.get("eos_token_id")),
        generation=folder.generation,
        path=path,
    )


def _open_hub(path: Path, dtype: str | None, place: Placing, adapter: Path | None = None) -> TrainedModel:
    """`adapter`: a folder in PEFT's format, which is merged into the weights as they come."""
    base = open_base(path)
    base.check()
    folder = base.hub
    shape, low = (folder.shape, dict[str, Tensor]()) if adapter is None else load_adapter(adapter, folder.shape)
    model, put = place(folder.shape, DTYPES[dtype] if dtype else folder.dtype)

    for name, found in base.weights():
        tensor = found if isinstance(found, Tensor) else found.dequantized()
        parts = adapter_parts(name, low)
        put(name, merged(tensor.float(), parts, shape.lora) if parts and shape.lora else tensor)
    return _with_tokenizer(model, folder if adapter is None else folder.prompted_by(adapter), adapter or path)
