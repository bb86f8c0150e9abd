"""Everything a run must carry on: weights, optimizer, scaler, counters. One flat dict of tensors, one of values."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel import Engine
from meshwright.parallel.data import local
from meshwright.spec.plan import Data
from meshwright.spec.recipe import Recipe
from meshwright.store.checkpoint import rng_state, set_rng_state
from meshwright.store.tensor_piece import Piece, piece
from meshwright.training.noise_scale import NoiseScale
from meshwright.training.optimizer import Optimizer
from meshwright.training.precision import LossScaler
from meshwright.training.skipping import StepSkipper


@dataclass(slots=True)
class Progress:
    """Counters of a run; they mean the same under any layout."""

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
"""Fields of Progress that a checkpoint has by their names."""


STATE_KEYS = {"optimizer": "adamw", "optimizer_states": "fp32", "master_weights": "fp32"}
"""Keys of a recipe that say which optimizer states there are, and what each was before there was the key."""
DATA_KEYS = ("packing", "overlong")
"""Keys of samples that say which rows there are."""
TEXT = Data()


@dataclass(slots=True)
class TrainState:
    """The laid-out model, optimizer, scaler, progress, and what is known of skipped steps."""

    engine: Engine
    optimizer: Optimizer
    scaler: LossScaler | None
    progress: Progress
    skipper: StepSkipper = field(default_factory=StepSkipper)
    base: str = ""
    """Which frozen weights an adapter is trained beside (store/base_weights.py)."""
    first_weights: str = ""
    """Of a run that compares answers with those of its first weights: their hash (training/reference.py)."""

    def model_tensors(self, *, trained: bool = False) -> dict[str, Tensor]:
        """Weights and kept buffers by parameter name (`model.NAME`): what this rank holds, as pieces of the whole.
        `trained`: only what is trained, beside adapters."""
        engine = self.engine
        engine.reshard()
        boxes = engine.local_boxes()
        some = {name: one for name, one in engine.parameters.items() if one.requires_grad or not trained}
        own = {name: local(parameter.detach()) for name, parameter in some.items()}
        if engine.gathered_dtype is not None:  # a checkpoint has both, whatever the layout
            own = {name: tensor.to(engine.gathered_dtype) for name, tensor in own.items()}
        found = {f"model.{name}": piece(tensor, boxes[name]) for name, tensor in own.items()}
        if trained and engine.model.shape.lora is not None:  # buffers are the base's, which is frozen
            return found
        return found | {f"model.{name}": buffer for name, buffer in engine.buffers.items()}

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Have the parameters, and the optimizer's masters, be what `model_tensors` gave and was then loaded."""
        if self.engine.gathered_dtype is None:
            self.optimizer.read_masters()
            return
        with torch.no_grad():
            for name, parameter in self.engine.parameters.items():
                given = weights.get(f"model.{name}")
                if given is None:
                    continue
                local(parameter.detach()).copy_(given.held if isinstance(given, Piece) else given)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, random generators included; the very ones in use, not copies (but generators')."""
        return self.pieces() | rng_state(self.engine.mesh.rank)[0]

    def pieces(self) -> dict[str, Tensor]:
        """The same without random generators."""
        found = self.model_tensors(trained=True)
        boxes = self.engine.local_boxes()
        for name, tensor in self.optimizer.tensors().items():
            box = self.optimizer.box(name, boxes[name.partition(".")[2]]) if tensor.dim() else None
            found["optimizer." + name] = piece(tensor, box)
        if self.scaler:
            found |= {"scaler." + name: tensor for name, tensor in self.scaler.tensors().items()}
        return found

    def values(self, recipe: Recipe, data: str, tokenizer: str, settings: Data = TEXT) -> dict[str, Any]:
        """All that is no tensor; `data` is the fingerprint of the corpus that the cursor counts in, `tokenizer` that of
        what its tokens mean. `settings`: how its rows are made."""
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
        """Take over the counters and random states of a checkpoint whose tensors were loaded in place."""
        self.progress = Progress(noise=NoiseScale(*values["noise"]), **{name: values[name] for name in COUNTERS})
        if "skipping" in values:  # an older checkpoint has none
            self.skipper.restore(values["skipping"])
        set_rng_state(tensors, values["random"], self.engine.mesh.rank)


def mixture_weights(data: Data) -> list[float]:
    """Of the sources of a mixture, of which the place in the data depends; one source by itself needs none."""
    return [source.weight for source in data.mixture] if len(data.mixture) > 1 else []


def seed_everything(seed: int) -> None:
    """Seed every generator a step may draw from (dropout); initial weights and data order have their own seeds."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
