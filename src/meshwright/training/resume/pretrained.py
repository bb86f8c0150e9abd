"""First weights from a Hugging Face folder under any layout. Each rank takes its part of one tensor at a time."""

import json
from collections.abc import Mapping
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.data.chat.prompt import turn_end_ids
from meshwright.formats.hub import HubFolder
from meshwright.formats.hub.json_files import GENERATION, TEMPLATE
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.detection import is_quantized
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import coded as codes_of
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel.apply import measure_rows
from meshwright.parallel.zero.data import local, take_codes
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import RANDOM, SAMPLES
from meshwright.store.durable import replace_file
from meshwright.store.model_weights import OTHERWISE, folder_of_weights
from meshwright.store.run_folder import ids_of
from meshwright.store.tensor_piece import Piece
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.resume.state import TrainState


def check_weights(plan: Plan) -> None:
    """Raise PlanError or HubError when the folder of `model.init` cannot start this plan.

    It is missing, has other parameters, or has another tokenizer than the plan, so that every token would change
    meaning.
    """
    if plan.init == RANDOM:
        return
    folder = folder_of_weights(plan).hub
    for theirs, ours in zip_longest(tensor_sizes(folder.shape).items(), tensor_sizes(plan.model.base).items()):
        if theirs != ours:
            there, here = (f"{entry[0]} {list(entry[1])}" if entry else "nothing more" for entry in (theirs, ours))
            raise PlanError(
                f"model.init={plan.init} has another shape: {there} there, {here} in the plan. Take "
                f"model={plan.init} without changed sizes, {OTHERWISE}"
            )
    _check_tokenizer(plan, folder)


def take_weights(state: TrainState, plan: Plan) -> None:
    """Fill the model, and the optimizer's fp32 masters, from the folder of `model.init`.

    In a 16-bit run the masters keep the digits that the weights cannot hold. Raises HubError when a file is damaged.
    """
    destinations, masters = state.model_tensors(), state.optimizer.masters
    coded = frozen_codes(state.engine.stages, plan.model)
    if state.engine.gathered_dtype is not None:  # the parameters themselves are the fp32 weights
        masters = {name: local(parameter.detach()) for name, parameter in state.engine.parameters.items()}

    def put(name: str, tensor: Tensor | QuantizedMatrix) -> None:
        if isinstance(tensor, QuantizedMatrix):
            take_codes(coded[name], tensor)
            return
        if name in coded:
            whole = tensor.to(coded[name].device)
            take_codes(coded[name], quantize_matrix(name, whole, coded[name].scheme))
            return
        destination = destinations.get(f"model.{name}")
        if isinstance(destination, Piece):
            box = destination.box
            part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            destination.held.copy_(tensor[part])
            if name in masters:
                masters[name].copy_(tensor[part])
        elif destination is not None:
            destination.copy_(tensor)
            if name in masters:  # buffers and frozen weights have none
                masters[name].copy_(tensor)

    with torch.no_grad():
        for name, tensor in folder_of_weights(plan).weights(
            lambda name: name in coded or f"model.{name}" in destinations
        ):
            put(name, tensor)
    if plan.model.lora is not None and plan.model.lora.dora:
        measure_rows(state.engine)
        state.take_weights({})


@torch.no_grad()
def round_largest(state: TrainState, plan: Plan) -> None:
    """Quantize a matrix as large as the largest frozen one, for the peak memory that loading a base as codes takes.

    Rounding by HQQ takes the most. Folders that hold codes already are not rounded.
    """
    coded = frozen_codes(state.engine.stages, plan.model)
    if not coded or (plan.init != RANDOM and is_quantized(Path(plan.init))):
        return
    largest = max(coded.values(), key=lambda codes: prod(codes.size))
    matrix = torch.empty(largest.size, dtype=DTYPES[plan.recipe.precision], device=largest.device)
    take_codes(largest, codes_of(matrix, largest.scheme))


def keep_extra_files(plan: Plan, run: Path, tokenizer: Tokenizer) -> None:
    """Store in the run folder what an export needs beyond weights and tokenizer.

    That is the folder's chat template and generation config, and the token that ends a trained answer.
    """
    folder = folder_of_weights(plan).hub if plan.init != RANDOM else None
    if folder is not None:
        keep_hub_files(folder, run)
    if plan.data.form == SAMPLES:
        _add_turn_end(run, tokenizer, folder.generation if folder is not None else {})


def _add_turn_end(run: Path, tokenizer: Tokenizer, generation: Mapping[str, object]) -> None:
    """Add the token that ends an answer of the chat template to the run's generation config.

    Its other ids stay, since ids that it does not list do not end a text. An export adds the tokenizer's own.
    """
    marks = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    config = dict(generation) or {name: id for name, id in marks.items() if id is not None}
    ends = ids_of(config.get("eos_token_id"))
    wanted = tuple(dict.fromkeys((*(ends or ids_of(tokenizer.eos)), *turn_end_ids(tokenizer))))
    if wanted != ends:
        content = json.dumps(config | {"eos_token_id": list(wanted)}, indent=2)
        replace_file(run / GENERATION, f"{content}\n".encode())


def keep_hub_files(folder: HubFolder, run: Path) -> None:
    """Copy chat template and generation config of a Hugging Face folder into a run folder."""
    if folder.chat_template is not None and not (run / TEMPLATE).is_file():
        replace_file(run / TEMPLATE, folder.chat_template.encode())
    if (folder.path / GENERATION).is_file():
        replace_file(run / GENERATION, (folder.path / GENERATION).read_bytes())


def init_sentence(plan: Plan) -> str:
    """Return the sentence that names the source of the weights."""
    tokenizer_path = Path(plan.init) / "tokenizer.json"
    tokenizer = ", and its tokenizer" if plan.data.tokenizer == str(tokenizer_path) else ""
    return f"weights of {plan.init}{tokenizer}; model.init=random draws new ones"


def _check_tokenizer(plan: Plan, folder: HubFolder) -> None:
    tokenizer_path = folder.tokenizer
    if tokenizer_path is None and plan.data.tokenizer == "auto":
        raise PlanError(
            f"model.init={plan.init} has no tokenizer.json, and its weights know no other tokens: give "
            f"data.tokenizer=PATH of its tokenizer, {OTHERWISE}"
        )
    if tokenizer_path is None or plan.data.tokenizer == str(tokenizer_path):
        return
    if not is_same_tokenizer(plan.data.tokenizer, tokenizer_path):
        raise PlanError(
            f"data.tokenizer={plan.data.tokenizer} differs from the tokenizer of model.init={plan.init}: take "
            f"data.tokenizer={tokenizer_path}, {OTHERWISE}"
        )


def is_same_tokenizer(tokenizer: str, tokenizer_path: Path) -> bool:
    """Return whether `data.tokenizer` equals a folder's tokenizer.json by content."""
    builtin = {"auto": Tokenizer.shipped, "bytes": Tokenizer.bytes}
    if tokenizer == str(tokenizer_path):
        return True
    if tokenizer.startswith("bpe:"):
        return False
    chosen = builtin[tokenizer]() if tokenizer in builtin else Tokenizer.load(Path(tokenizer).expanduser())
    return chosen.fingerprint == Tokenizer.load(tokenizer_path).fingerprint
