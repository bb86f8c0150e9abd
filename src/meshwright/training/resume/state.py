"""The state that a run resumes from: weights, optimizer, scaler, counters. One flat dict of tensors, one of values."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel import Engine
from meshwright.parallel.zero.data import local
from meshwright.spec.plan.plan import Data
from meshwright.spec.recipe.recipe import Recipe
from meshwright.store.checkpoint import rng_state, set_rng_state
from meshwright.store.tensor_piece import Piece, piece
from meshwright.training.optimizer.noise_scale import NoiseScale
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import LossScaler
from meshwright.training.optimizer.skipping import StepSkipper


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
    base: str = ""
    """Fingerprint of the frozen weights beside an adapter (store/model_weights.py)."""
    first_weights: str = ""
    """Hash of the first weights, when the run compares answers with theirs (training/objectives/reference.py)."""

    def model_tensors(self, *, trained: bool = False) -> dict[str, Tensor]:
        """Return this rank's pieces of weights and buffers by parameter name (`model.NAME`).

        `trained` leaves out what is frozen beside adapters.
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
            "random": rng_state()[1],
        }

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore counters and random states of a checkpoint whose tensors were loaded in place."""
        self.progress = Progress(noise=NoiseScale(*values["noise"]), **{name: values[name] for name in COUNTERS})
        if "skipping" in values:  # an older checkpoint has none
            self.skipper.restore(values["skipping"])
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
