"""A training loop that shares nothing with ours: AdamW by hand around a model of transformers, in double precision.

What is written here again, from the papers: the loss as a sum over the valid targets of the whole step, clipping by the
norm of all gradients, AdamW (Loshchilov and Hutter 2019, algorithm 2) with weight decay of matrices only, and the
schedules. Attention, norms, rotation and experts are those of transformers.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.formats.hub import load_weights, shape_from_config
from meshwright.spec import ModelShape
from tests.formats.hub.peers import _GPT2, _SIZES, PEERS, VOCAB, shake

STEPS, WARMUP, DECAY = 20, 4, 8
RATE, BETA1, BETA2, EPSILON, DECAYS, CLIP = 3e-3, 0.9, 0.95, 1e-3, 0.1, 1.0
"""Epsilon above the rounding of a gradient in single precision: below, AdamW steps by noise where gradients vanish."""
BATCH, SEQUENCE = 8, 16
FLOOR = 0.1
"""Share of the learning rate at the end of a schedule."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model of transformers, and the schedule that it is trained with."""

    peer: str
    schedule: str
    layers: int = 2

    def model(self) -> Any:
        """The model in fp32 with random weights, the same on every call."""
        import transformers

        family, options = PEERS[self.peer]
        sizes = _GPT2 | {"n_layer": self.layers} if family == "gpt2" else _SIZES | {"num_hidden_layers": self.layers}
        dropout = {name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop") if family == "gpt2"}
        config = transformers.AutoConfig.for_model(family, **{**sizes, **options, **dropout})
        plain = {"experts_implementation": "eager"} if "expert" in str(options) else {}  # grouped ones know no fp64
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **plain)
        shake(dict(model.named_parameters()), seed=3)
        return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (BATCH, SEQUENCE) of a step; unequally many targets of each sequence count, none of one."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    targets = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    stored = torch.rand(BATCH, 1, generator=generator)
    stored[step % BATCH] = 0.0
    targets[torch.rand((BATCH, SEQUENCE), generator=generator) >= stored] = -100
    return tokens, targets


def rate(schedule: str, step: int) -> float:
    """Of steps 1 to STEPS: a line up to RATE, then the schedule's way down."""
    if step <= WARMUP:
        return RATE * step / WARMUP
    begin = STEPS - DECAY if schedule == "wsd" else WARMUP
    if step <= begin:
        return RATE
    done = (step - begin) / (STEPS - begin)
    height = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return RATE * (FLOOR + (1 - FLOOR) * height)


def trained(model: Any, schedule: str) -> list[float]:
    """Train in double precision, in place; by how much each step's gradient was clipped."""
    model.double().train()
    named = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in named.items()}
    second = {name: torch.zeros_like(p) for name, p in named.items()}
    clipped = []
    for step in range(1, STEPS + 1):
        tokens, targets = batch(step)
        chances = model(tokens, use_cache=False).logits.log_softmax(-1)
        valid = targets >= 0
        chosen = chances.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        model.zero_grad()
        (-(chosen * valid).sum() / valid.sum()).backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        factor = min(1.0, CLIP / (norm + 1e-6))
        clipped.append(factor)
        with torch.no_grad():
            for name, p in named.items():
                g = gradients[name] * factor
                first[name] = BETA1 * first[name] + (1 - BETA1) * g
                second[name] = BETA2 * second[name] + (1 - BETA2) * g * g
                direction = (first[name] / (1 - BETA1**step)) / ((second[name] / (1 - BETA2**step)).sqrt() + EPSILON)
                decay = DECAYS * p if p.dim() > 1 else 0.0
                p -= rate(schedule, step) * (direction + decay)
    return clipped


def named_as_ours(model: Any, folder: Path) -> tuple[ModelShape, dict[str, Tensor]]:
    """The shape and the weights of a model of transformers, by our names, in the dtype they have."""
    model.save_pretrained(folder)
    shape, actual = shape_from_config(model.config.to_dict()), dict[str, Tensor]()
    load_weights(folder, shape, lambda name, tensor: actual.update({name: tensor.clone()}))
    return shape, actual
