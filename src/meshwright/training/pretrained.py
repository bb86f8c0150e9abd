"""First weights from a Hugging Face folder, under any layout: a tensor at a time, and of it what this rank holds."""

import json
from collections.abc import Mapping
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.data.chat_prompt import turn_end_ids
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.kernels.weight_codes import coded as codes_of
from meshwright.kernels.weight_codes import quantize_matrix
from meshwright.model.hub import HubFolder
from meshwright.model.hub.folder_config import GENERATION, TEMPLATE
from meshwright.model.hub.weight_names import tensor_sizes
from meshwright.model.quantized_formats.folder_quantization import is_quantized
from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel.apply import measure_rows
from meshwright.parallel.data import local, take_codes
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.plan import RANDOM, SAMPLES
from meshwright.store.base_weights import OTHERWISE, folder_of_weights
from meshwright.store.durable import replace_file
from meshwright.store.run_folder import ids_of
from meshwright.store.tensor_piece import Piece
from meshwright.training.precision import DTYPES
from meshwright.training.state import TrainState


def check_weights(plan: Plan) -> None:
    """PlanError or HubError where the folder of `model.init` cannot begin this plan: it is not there, its parameters
    are others, or its tokenizer is not the one of the plan, so that every token would mean something else."""
    if plan.init == RANDOM:
        return
    folder = folder_of_weights(plan).hub
    for theirs, ours in zip_longest(tensor_sizes(folder.shape).items(), tensor_sizes(plan.model.base).items()):
        if theirs != ours:
            there, here = (f"{one[0]} {list(one[1])}" if one else "nothing more" for one in (theirs, ours))
            raise PlanError(
                f"model.init={plan.init} has another shape: {there} there, {here} in the plan. Take "
                f"model={plan.init} without changed sizes, {OTHERWISE}"
            )
    _check_tokenizer(plan, folder)


def take_weights(state: TrainState, plan: Plan) -> None:
    """Fill the model, and the optimizer's fp32 copy of it, from the folder of `model.init`: in a 16-bit run the copy
    keeps what the weights have no room for. HubError where a file is damaged."""
    places, masters = state.model_tensors(), state.optimizer.masters
    coded = frozen_codes(state.engine.stages, plan.model)
    if state.engine.gathered_dtype is not None:  # the parameters are what is to be filled
        masters = {name: local(parameter.detach()) for name, parameter in state.engine.parameters.items()}

    def put(name: str, tensor: Tensor | QuantizedMatrix) -> None:
        if isinstance(tensor, QuantizedMatrix):
            take_codes(coded[name], tensor)
            return
        if name in coded:
            here = tensor.to(coded[name].device)
            take_codes(coded[name], quantize_matrix(name, here, coded[name].scheme))
            return
        place = places.get(f"model.{name}")
        if isinstance(place, Piece):
            box = place.box
            part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            place.held.copy_(tensor[part])
            if name in masters:
                masters[name].copy_(tensor[part])
        elif place is not None:
            place.copy_(tensor)
            if name in masters:  # a kept buffer, or what is not trained, has none
                masters[name].copy_(tensor)

    with torch.no_grad():
        for name, tensor in folder_of_weights(plan).weights(lambda name: name in coded or f"model.{name}" in places):
            put(name, tensor)
    if plan.model.lora is not None and plan.model.lora.dora:
        measure_rows(state.engine)
        state.take_weights({})


@torch.no_grad()
def round_largest(state: TrainState, plan: Plan) -> None:
    """What taking the frozen base as codes holds at most beside the model: its largest matrix, and what rounding that
    takes (turns of HQQ most). Of a folder with codes nothing is rounded."""
    coded = frozen_codes(state.engine.stages, plan.model)
    if not coded or (plan.init != RANDOM and is_quantized(Path(plan.init))):
        return
    largest = max(coded.values(), key=lambda one: prod(one.size))
    matrix = torch.empty(largest.size, dtype=DTYPES[plan.recipe.precision], device=largest.device)
    take_codes(largest, codes_of(matrix, largest.scheme))


def keep_beside(plan: Plan, run: Path, tokenizer: Tokenizer) -> None:
    """What the folder knows beyond weights and tokenizer (chat template, generation config), kept for an export, and
    what ends an answer of those that are trained."""
    folder = folder_of_weights(plan).hub if plan.init != RANDOM else None
    if folder is not None:
        keep_extras(folder, run)
    if plan.data.form == SAMPLES:
        _keep_turn_end(run, tokenizer, folder.generation if folder is not None else {})


def _keep_turn_end(run: Path, tokenizer: Tokenizer, known: Mapping[str, object]) -> None:
    """The token that ends an answer of the chat template into the run's generation config, whose other ids stay: what
    is not among them does not end a text. An export names the tokenizer's own ends by itself."""
    marks = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    config = dict(known) or {name: id for name, id in marks.items() if id is not None}
    ends = ids_of(config.get("eos_token_id"))
    wanted = tuple(dict.fromkeys((*(ends or ids_of(tokenizer.eos)), *turn_end_ids(tokenizer))))
    if wanted != ends:
        content = json.dumps(config | {"eos_token_id": list(wanted)}, indent=2)
        replace_file(run / GENERATION, f"{content}\n".encode())


def keep_extras(found: HubFolder, run: Path) -> None:
    """Chat template and generation config of a Hugging Face folder into a run folder."""
    if found.chat_template is not None and not (run / TEMPLATE).is_file():
        replace_file(run / TEMPLATE, found.chat_template.encode())
    if (found.path / GENERATION).is_file():
        replace_file(run / GENERATION, (found.path / GENERATION).read_bytes())


def said(plan: Plan) -> str:
    """The sentence of the first lines."""
    own = Path(plan.init) / "tokenizer.json"
    tokenizer = ", and its tokenizer" if plan.data.tokenizer == str(own) else ""
    return f"weights of {plan.init}{tokenizer}; model.init=random draws new ones"


def _check_tokenizer(plan: Plan, folder: HubFolder) -> None:
    own = folder.tokenizer
    if own is None and plan.data.tokenizer == "auto":
        raise PlanError(
            f"model.init={plan.init} has no tokenizer.json, and its weights know no other tokens: give "
            f"data.tokenizer=PATH of its tokenizer, {OTHERWISE}"
        )
    if own is None or plan.data.tokenizer == str(own):
        return
    if not means_the_same(plan.data.tokenizer, own):
        raise PlanError(
            f"data.tokenizer={plan.data.tokenizer} differs from the tokenizer of model.init={plan.init}: take "
            f"data.tokenizer={own}, {OTHERWISE}"
        )


def means_the_same(given: str, own: Path) -> bool:
    """Whether `data.tokenizer` is what the tokenizer.json of a folder is, by its content."""
    builtin = {"auto": Tokenizer.shipped, "bytes": Tokenizer.bytes}
    if given == str(own):
        return True
    if given.startswith("bpe:"):
        return False
    found = builtin[given]() if given in builtin else Tokenizer.load(Path(given).expanduser())
    return found.fingerprint == Tokenizer.load(own).fingerprint
