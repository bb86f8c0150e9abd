"""Steps of the engine alone, a row for each of many plans: seconds and peak memory, measured and planned.

What stands beside rivals is in whole_steps.py. These rows say how a recipe or layout changes a step, and are what the
planner is held against. Tokens are random; documents are of equal lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu.timing import Timer
from benchmarks.gpu.whole_steps import Step, timed
from meshwright.parallel import make_mesh
from meshwright.planner.step.predict import predict
from meshwright.spec import Cluster, Layout, Plan, Recipe, presets
from meshwright.spec.layout.cluster import Device
from meshwright.training import device as machine
from meshwright.training.loop import new_state
from meshwright.training.step.batches import Batch
from meshwright.training.step.step import train_step

COMPILED: Mapping[str, Any] = {"compile": "on"}
NARROW: Mapping[str, Any] = {"optimizer_states": "bf16", "master_weights": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """A plan on one device."""

    model: str
    sequence: int
    micro_batch: int
    accumulation: int = 1
    layers: int = 0
    """0 = all of the model."""
    vocab: int = 0
    """0 = the model's."""
    documents: int = 0
    """Of each row; 0 = rows are plain text."""
    layout: Mapping[str, Any] = field(default_factory=lambda: COMPILED)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 5

    @property
    def words(self) -> str:
        """What differs from a plain compiled step in bf16."""
        settings = {
            key: value for key, value in {**self.layout, **self.recipe}.items() if (key, value) != ("compile", "on")
        }
        texts = [f"{key}={value}" for key, value in settings.items()]
        texts += [f"{self.documents} documents a row"] if self.documents else []
        return ", ".join([*texts, *([f"vocab={self.vocab}"] if self.vocab else [])]) or "-"

    @property
    def name(self) -> str:
        """For people."""
        size = f"{self.micro_batch} x {self.sequence:,} x {self.accumulation}"
        return f"engine step of {self.model}, {size}, {self.words}"

    def plan(self, device: torch.device) -> Plan:
        """On the device that is here."""
        shape = presets.model(self.model)
        shape = replace(
            shape, max_positions=max(shape.max_positions, self.sequence), layers=self.layers or shape.layers,
            vocab=self.vocab or shape.vocab,
        )  # fmt: skip
        recipe = {"precision": "bf16", **self.recipe}
        return Plan(
            model=shape, cluster=Cluster(device=machine.known_device(device) or Device(name=machine.title(device))),
            layout=Layout(micro_batch=self.micro_batch, **self.layout),
            recipe=Recipe(
                sequence=self.sequence, global_batch=self.micro_batch * self.accumulation,
                document_mask=bool(self.documents), **recipe,
            ),
        )  # fmt: skip


B1 = EngineStep(model="llama-3.2-1b", sequence=4096, micro_batch=4)
B8 = EngineStep(model="llama-3.1-8b", sequence=8192, micro_batch=1)
GPT2 = EngineStep(model="gpt2-124m", sequence=1024, micro_batch=64)
ENGINE_STEPS = [
    B1, replace(B1, documents=8), replace(B8, layers=20), GPT2,
    EngineStep(model="llama-100m", sequence=2048, micro_batch=16), replace(B1, layout={"compile": "off"}),
    replace(B1, recipe={"products": "fp8"}), replace(B1, recipe={"optimizer_states": "int8"}),
    EngineStep(model="llama-3.1-8b", sequence=4096, micro_batch=4, accumulation=2, recipe=NARROW),
    EngineStep(model="qwen3-30b-a3b", sequence=4096, micro_batch=2, layers=6),
    EngineStep(model="llama-3.2-1b", sequence=32768, micro_batch=1),
    replace(B1, layout={**COMPILED, "recompute": "selective"}), replace(B1, accumulation=4),
    replace(B8, recipe={"optimizer_states": "int8", "master_weights": "none"}),
    replace(GPT2, micro_batch=32), replace(GPT2, micro_batch=32, layout={"compile": "off"}),
    replace(GPT2, vocab=50304),
    EngineStep(model="qwen2.5-7b", sequence=1024, micro_batch=4, accumulation=8, recipe=NARROW),
    replace(B8, layers=20, layout={"compile": "off"}),
    replace(B1, recipe={"precision": "fp32", "tf32": True}),
    EngineStep(model="qwen2.5-1.5b", sequence=1024, micro_batch=16),
    EngineStep(model="llama-3.1-8b", sequence=4096, micro_batch=4, accumulation=2, recipe=NARROW,
               layout={**COMPILED, "recompute": "full"}),
    replace(B1, recipe={"deterministic": True}, layout={"compile": "off"}, rank=6),
    replace(B1, recipe={"deterministic": True}, rank=6),
]  # fmt: skip
"""Most telling first. The first twenty sizes are those of docs/benchmarks/README.md."""
TINY_ENGINE_STEPS = [
    EngineStep(model="llama-tiny", sequence=32, micro_batch=2, documents=2, layout={"compile": "off"},
               recipe={"precision": "fp32"}),
]  # fmt: skip


def batch(plan: Plan, entry: EngineStep, device: torch.device) -> Batch:
    """A micro-batch of random tokens."""
    rows, length = entry.micro_batch, entry.sequence
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(plan.model.vocab, (rows, length + 1), generator=generator).to(device)
    fields: dict[str, Any] = {}
    if entry.documents:
        each = length // entry.documents
        places = torch.arange(length, dtype=torch.int32, device=device).expand(rows, length)
        fields = {
            "documents": places // each, "positions": places % each, "masked": True,
            "documents_of_rows": ((entry.documents, each),) * rows,
        }  # fmt: skip
    return Batch(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), valid=rows * length,
        valid_of_rows=(length,) * rows, **fields,
    )  # fmt: skip


def step_of(plan: Plan, entry: EngineStep, device: torch.device) -> Step:
    """The engine's own step, as `train` makes it."""
    recipe = plan.recipe
    machine.prepare(
        device, recipe.precision, tf32=recipe.tf32, deterministic=recipe.deterministic, products=recipe.products
    )
    state = new_state(plan, make_mesh(plan.layout), device, initialize=True)
    state.engine.train()
    micro_batches = [batch(plan, entry, device)] * entry.accumulation
    return lambda: (
        train_step(
            state.engine, state.optimizer, micro_batches, rate=1e-4, clip=recipe.clip, balance_loss=recipe.balance_loss
        ).loss
    )


def row(entry: EngineStep, device: torch.device, timer: Timer, *, seconds: float) -> dict[str, Any]:
    """What one plan took, and what the planner says of it."""
    plan = entry.plan(device)
    figures = timed(lambda: step_of(plan, entry, device), timer, seconds)
    torch.use_deterministic_algorithms(False)  # of the rows that ask for it alone
    prediction = predict(plan)
    known = plan.cluster.device.half_flop_per_s > 0
    return {
        "model": entry.model, "layers": plan.model.layers, "of_layers": presets.model(entry.model).layers,
        "sequence": entry.sequence, "micro_batch": entry.micro_batch, "accumulation": entry.accumulation,
        "words": entry.words, "tokens": plan.recipe.global_batch * entry.sequence,
        "planned_s": prediction.step_s if known else None,
        "planned_peak_bytes": prediction.peak_bytes - prediction.worst.kinds["reserve"] if known else None, **figures,
    }  # fmt: skip
