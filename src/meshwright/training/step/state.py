"""The state that a run resumes from, or begins with: weights, optimizer, scaler, counters.

It is one flat dict of tensors and one of values. First weights come from a Hugging Face folder under any layout. Each
rank takes its part of one tensor at a time.

The gradient noise scale is the useful batch size (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).
For gradients G_small, G_big of batches of b < B tokens, E|G|^2 = |true|^2 + tr(Sigma)/size. Two sizes give both:
    tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1/b - 1/B)        |true|^2 = |G_big|^2 - tr(Sigma)/B
and the noise scale is tr(Sigma) / |true|^2, in tokens: the critical batch size. The micro-batches of one step are the
small batches, the step is the big one. Both terms are averaged over measurements before dividing, as the paper advises.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.data.chat.rendering import turn_end_ids
from meshwright.formats.hub import HubFolder
from meshwright.formats.hub.config import GENERATION, TEMPLATE
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.detection import is_quantized
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import coded as codes_of
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import frozen_codes
from meshwright.parallel import Engine
from meshwright.parallel.apply import measure_rows
from meshwright.parallel.axes.data import local, take_codes
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError, argument
from meshwright.spec.plan.plan import RANDOM, SAMPLES, Data
from meshwright.spec.recipe.recipe import Recipe
from meshwright.store import checkpoint
from meshwright.store.checkpoint import rng_state, set_rng_state
from meshwright.store.durable import replace_file
from meshwright.store.model_weights import OTHERWISE, folder_of_weights
from meshwright.store.run_folder import ids_of
from meshwright.store.saver import Piece, piece
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES, LossScaler, StepSkipper
from meshwright.training.step.spikes import SpikeWatch

DECAY = 0.9


@dataclass(slots=True)
class NoiseScale:
    """Running averages of tr(Sigma) and |true|^2."""

    variance: float = 0.0
    signal: float = 0.0
    weight: float = 0.0

    def add(self, small_squared: Sequence[float], small_tokens: Sequence[float], big_squared: float) -> None:
        """Add one measurement: squared norms of the mean gradients of each micro-batch and of the whole step.

        Micro-batches without a valid token are ignored. A step with fewer than two others, or whose gradient overflowed
        (fp16), adds nothing.
        """
        small = [(squared, tokens) for squared, tokens in zip(small_squared, small_tokens, strict=True) if tokens]
        mean_squared = sum(squared for squared, _ in small) / max(1, len(small))
        if len(small) < 2 or not math.isfinite(mean_squared + big_squared):
            return
        inverse = sum(1 / tokens for _, tokens in small) / len(small)
        big = sum(tokens for _, tokens in small)
        variance = (mean_squared - big_squared) / (inverse - 1 / big)
        signal = big_squared - variance / big
        self.variance = DECAY * self.variance + (1 - DECAY) * variance
        self.signal = DECAY * self.signal + (1 - DECAY) * signal
        self.weight = DECAY * self.weight + (1 - DECAY)

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens. None = not measured yet, or noise hides the signal."""
        if self.weight == 0 or self.signal <= 0 or self.variance <= 0:
            return None
        return self.variance / self.signal


@dataclass(slots=True)
class Progress:
    """Counters of a run, with the same meaning under any layout."""

    step: int = 0
    cursor: int = 0
    """Sequences read by all ranks together."""
    tokens: int = 0
    seconds: float = 0.0
    noise: NoiseScale = field(default_factory=NoiseScale)
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None


COUNTERS = ("step", "cursor", "tokens", "seconds", "eval_loss", "best_eval_loss", "best_step")
"""Fields of Progress that a checkpoint stores under their names."""


STATE_KEYS = {"optimizer": "adamw", "optimizer_states": "fp32", "master_weights": "fp32"}
"""Recipe keys that decide which optimizer states exist, and the values of checkpoints without the key."""
DATA_KEYS = ("packing", "overlong")
"""Keys of samples that decide which rows exist."""
TEXT = Data()


@dataclass(slots=True)
class TrainState:
    """The laid-out model, optimizer, scaler, progress, and statistics of skipped steps."""

    engine: Engine
    optimizer: Optimizer
    scaler: LossScaler | None
    progress: Progress
    skipper: StepSkipper = field(default_factory=StepSkipper)
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    base: str = ""
    """Fingerprint of the frozen weights under an adapter (store/model_weights.py)."""
    first_weights: str = ""
    """Hash of the first weights, when the run compares answers with theirs (training/objectives/reference.py)."""

    def model_tensors(self, *, trained: bool = False) -> dict[str, Tensor]:
        """Return this rank's pieces of weights and buffers by parameter name (`model.NAME`).

        `trained` leaves out what is frozen under adapters.
        """
        engine = self.engine
        engine.reshard()
        boxes = engine.local_boxes()
        shards = {
            name: local(parameter.detach())
            for name, parameter in engine.parameters.items()
            if parameter.requires_grad or not trained
        }
        if engine.gathered_dtype is not None:  # a checkpoint has weights and masters, whatever the layout
            shards = {name: tensor.to(engine.gathered_dtype) for name, tensor in shards.items()}
        tensors = {f"model.{name}": piece(tensor, boxes[name]) for name, tensor in shards.items()}
        if trained and engine.model.shape.lora is not None:  # buffers belong to the base, which is frozen
            return tensors
        return tensors | {f"model.{name}": buffer for name, buffer in engine.buffers.items()}

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Set parameters and optimizer masters to loaded weights that `model_tensors` had returned."""
        if self.engine.gathered_dtype is None:
            self.optimizer.read_masters()
            return
        with torch.no_grad():
            for name, parameter in self.engine.parameters.items():
                weight = weights.get(f"model.{name}")
                if weight is not None:
                    local(parameter.detach()).copy_(weight.held if isinstance(weight, Piece) else weight)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state with random generators. They are in use, not copies, except generators'."""
        return self.pieces() | rng_state(self.engine.mesh.rank)[0]

    def pieces(self) -> dict[str, Tensor]:
        """Return the tensors without random generators."""
        tensors = self.model_tensors(trained=True)
        boxes = self.engine.local_boxes()
        for name, tensor in self.optimizer.tensors().items():
            box = self.optimizer.box(name, boxes[name.partition(".")[2]]) if tensor.dim() else None
            tensors["optimizer." + name] = piece(tensor, box)
        if self.scaler:
            tensors |= {"scaler." + name: tensor for name, tensor in self.scaler.tensors().items()}
        return tensors

    def values(self, recipe: Recipe, data: str, tokenizer: str, settings: Data = TEXT) -> dict[str, Any]:
        """Return everything that is not a tensor.

        Args:
            data: Fingerprint of the corpus that the cursor counts in.
            tokenizer: Fingerprint of the tokenizer.
            settings: How rows are made.
        """
        noise = self.progress.noise
        return {
            **{name: getattr(self.progress, name) for name in COUNTERS},
            "sequence": recipe.sequence,
            "seed": recipe.seed,
            "precision": recipe.precision,
            **{key: getattr(recipe, key) for key in STATE_KEYS},
            **{key: getattr(settings, key) for key in DATA_KEYS if settings.form == "samples"},
            **({"malformed": settings.malformed} if settings.malformed != TEXT.malformed else {}),
            **({"weights": mixture_weights(settings)} if len(settings.mixture) > 1 else {}),
            "data": data,
            "tokenizer": tokenizer,
            **({"base": self.base} if self.base else {}),
            **({"first_weights": self.first_weights} if self.first_weights else {}),
            **({"adapter_scale": lora.scale} if (lora := self.engine.model.shape.lora) else {}),
            "noise": [noise.variance, noise.signal, noise.weight],
            "skipping": self.skipper.values(),
            **({"spikes": asdict(self.spikes)} if recipe.rollback_spikes else {}),
            "random": rng_state()[1],
        }

    def load(self, checkpoint_path: Path) -> None:
        """Restore everything from a checkpoint that was verified. All ranks call this together."""
        tensors = self.tensors()
        checkpoint.load(checkpoint_path, tensors, verified=True)
        self.restore(tensors, checkpoint.read_values(checkpoint_path))

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore counters and random states of a checkpoint whose tensors were loaded in place."""
        self.progress = Progress(noise=NoiseScale(*values["noise"]), **{name: values[name] for name in COUNTERS})
        if "skipping" in values:  # an older checkpoint has none
            self.skipper.restore(values["skipping"])
        # Absent where the run did not ask for rollbacks then.
        self.spikes = SpikeWatch(**values.get("spikes", {}))
        set_rng_state(tensors, values["random"], self.engine.mesh.rank)


def mixture_weights(data: Data) -> list[float]:
    """Return the weights of a mixture, on which the position in the data depends. Empty for a single source."""
    return [source.weight for source in data.mixture] if len(data.mixture) > 1 else []


def seed_everything(seed: int) -> None:
    """Seed every generator that a step may use (dropout). Initial weights and data order have their own seeds."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
                f"{argument('model', plan.init)} without changed sizes, {OTHERWISE}"
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
            tensor_here = tensor.to(coded[name].device)
            take_codes(coded[name], quantize_matrix(name, tensor_here, coded[name].scheme))
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
    plan_tokenizer = builtin[tokenizer]() if tokenizer in builtin else Tokenizer.load(Path(tokenizer).expanduser())
    return plan_tokenizer.fingerprint == Tokenizer.load(tokenizer_path).fingerprint
