"""Training steps of 1B and 8B shapes: tokens per second, MFU and peak memory, beside transformers and Liger.

Every contestant holds the same states: bf16 products, fp32 weights to update, two fp32 moments, AdamW in one fused
pass, clipping at 1. Ours keeps bf16 weights and fp32 masters; transformers keeps fp32 weights under autocast, as its
Trainer does. Where a model's states do not fit, layers are left out: the row says how many are there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, reload
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.errors import reason
from benchmarks.gpu.timing import Spread, Timer
from benchmarks.train_speed import their_config
from meshwright.parallel import build_engine
from meshwright.planner.step.predict import predict
from meshwright.spec import Cluster, Layout, Plan, Recipe, presets
from meshwright.spec.layout.cluster import Device
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import token_flop
from meshwright.training import device as machine
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Batch
from meshwright.training.step.step import train_step

Step = Callable[[], Any]
OURS = {
    "ours": {"compile": "off", "cuda_graphs": "off"},
    "ours, compiled": {"compile": "on", "cuda_graphs": "off"},
    "ours, compiled, CUDA graphs": {"compile": "on", "cuda_graphs": "on"},
}
"""Layouts."""
THEIRS = ("transformers", "transformers, compiled", "transformers with Liger")
WARM, LEAST, MOST = 5, 3, 30
"""Steps: before time is taken (three passes before a graph is captured, and that), and timed."""
ROOM = 0.75
"""Of a GPU's memory that the planner may fill: rivals hold more than ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A model and a batch."""

    model: str
    sequence: int
    rows: int
    rank: int
    expected_s: float
    """Of all contestants, compilation included."""
    alone: bool = False
    """Ours only: a small model, with CUDA graphs and without."""

    @property
    def name(self) -> str:
        """For people."""
        return f"step of {self.model}, {self.rows} x {self.sequence:,}"


STEPS = [
    StepEntry(model="llama-3.2-1b", sequence=4096, rows=2, rank=2, expected_s=150),
    StepEntry(model="gpt2-124m", sequence=1024, rows=4, rank=3, expected_s=100, alone=True),
    StepEntry(model="llama-3.1-8b", sequence=8192, rows=1, rank=4, expected_s=150),
]
TINY_STEPS = [StepEntry(model="llama-tiny", sequence=32, rows=2, rank=2, expected_s=5)]


def plan_of(shape: ModelShape, entry: StepEntry, device: torch.device, *, how: str, precision: str) -> Plan:
    """What ours trains, on the device that is here."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    here = machine.known_device(device) or Device(name=machine.title(device), memory_bytes=memory)
    return Plan(
        model=shape, cluster=Cluster(device=here),
        layout=Layout(**OURS[how], micro_batch=entry.rows),  # type: ignore[arg-type]  # words of a layout
        recipe=Recipe(
            sequence=entry.sequence, global_batch=entry.rows, document_mask=False,
            precision=precision,  # type: ignore[arg-type]  # one of its words
        ),
    )  # fmt: skip


def predicted_bytes(plan: Plan) -> float:
    """Of live tensors at the peak, by the planner: without what the allocator holds for later."""
    prediction = predict(plan)
    return prediction.peak_bytes - prediction.worst.kinds["reserve"]


def fitting(entry: StepEntry, device: torch.device, precision: str) -> ModelShape:
    """The model with as many layers as the planner finds room for."""
    shape = presets.model(entry.model)
    shape = replace(shape, max_positions=max(shape.max_positions, entry.sequence))
    if device.type != "cuda":
        return shape
    room = ROOM * torch.cuda.mem_get_info(device)[0]
    for layers in range(shape.layers, 0, -1):
        cut = replace(shape, layers=layers)
        if predict(plan_of(cut, entry, device, how="ours", precision=precision)).peak_bytes <= room:
            return cut
    return replace(shape, layers=1)


def _tokens(shape: ModelShape, entry: StepEntry, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocab, (entry.rows, entry.sequence + 1), generator=generator).to(device)


def ours(plan: Plan, entry: StepEntry, device: torch.device) -> Step:
    """Meshwright's own training step."""
    machine.prepare(device, plan.recipe.precision)  # also takes back what `theirs` set
    engine = build_engine(plan.model, plan.layout, device=device, dtype=DTYPES[plan.recipe.precision])
    engine.train()
    optimizer = Optimizer(engine.parameters.items(), plan.recipe)
    tokens = _tokens(plan.model, entry, device)
    batch = Batch(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), valid=entry.rows * entry.sequence
    )
    return lambda: train_step(engine, optimizer, [batch], rate=1e-4, clip=1.0, balance_loss=0.0).loss


def theirs(shape: ModelShape, entry: StepEntry, device: torch.device, precision: str, how: str) -> Step:
    """transformers' Llama in a plain loop."""
    # Liger puts its kernels into the module, where those of the next model would find them
    llama = reload(import_module("transformers.models.llama.modeling_llama"))
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default, which ours switches off
    if how == "liger":
        import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    with device:
        plain = llama.LlamaForCausalLM(their_config(shape)).train()
    model = torch.compile(plain, dynamic=False) if how == "compiled" else plain
    fused: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizer = torch.optim.AdamW(plain.parameters(), **fused)
    tokens = _tokens(shape, entry, device)[:, :-1].contiguous()

    def step() -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ours_of(entry: StepEntry, device: torch.device) -> list[str]:
    """Names of our contestants: graphs for small models, on a GPU."""
    return [name for name in OURS if "graphs" not in name or (entry.alone and device.type == "cuda")]


def makers(
    shape: ModelShape, entry: StepEntry, device: torch.device, precision: str, skip: set[str]
) -> dict[str, Callable[[], Step]]:
    """By name, in the order in which they run; those of packages that are not here are left out."""

    def mine(how: str) -> Step:
        return ours(plan_of(shape, entry, device, how=how, precision=precision), entry, device)

    others = {} if entry.alone else dict(zip(THEIRS, ("eager", "compiled", "liger"), strict=True))
    by_name: dict[str, Callable[[], Step]] = {
        **{name: partial(mine, name) for name in ours_of(entry, device)},
        **{name: partial(theirs, shape, entry, device, precision, how) for name, how in others.items()},
    }
    return {name: make for name, make in by_name.items() if not any(word in name.lower() for word in skip)}


def timed(make: Callable[[], Step], timer: Timer, seconds: float) -> dict[str, Any]:
    """Spread of a step's seconds, and its peak; or why it failed."""
    times: list[float] = []
    try:
        peak = timer.peak_bytes(lambda: _run(make(), timer, seconds, times))
    except Exception as failure:
        return {"failed": reason(failure)}
    finally:
        torch.compiler.reset()
        timer.release()
    spread = Spread.from_times(times)
    return {
        "seconds": {"median": spread.median, "low": spread.low, "high": spread.high}, "steps": len(times),
        "peak_bytes": peak,
    }  # fmt: skip


def _run(step: Step, timer: Timer, seconds: float, times: list[float]) -> None:
    """Steps one behind the other, as training makes them: the device is waited for at the end only."""
    for _ in range(WARM):
        step()
    timer.settle()
    start, count = time.perf_counter(), 0
    marks = [timer.mark()]
    while count < LEAST or (count < MOST and time.perf_counter() - start < seconds):
        step()
        marks.append(timer.mark())
        count += 1
        if count % LEAST == 0:
            timer.settle()
    timer.settle()
    times += [timer.seconds(a, b) for a, b in pairwise(marks)]


def row(
    entry: StepEntry, device: torch.device, timer: Timer, ceilings: Ceilings, *, seconds: float, skip: set[str],
    late: Callable[[], bool], precision: str,
) -> dict[str, Any]:  # fmt: skip
    """All contestants on one model, one after another: their states do not fit beside each other."""
    whole, shape = presets.model(entry.model), fitting(entry, device, precision)
    contestants: dict[str, dict[str, Any]] = {}
    for name, make in makers(shape, entry, device, precision, skip).items():
        contestants[name] = {"left_out": "no time left"} if late() else timed(make, timer, seconds)
        _rates(contestants[name], shape, entry, device, ceilings, precision)
    for name in OURS:
        if name in contestants:
            plan = plan_of(shape, entry, device, how=name, precision=precision)
            contestants[name]["predicted_peak_bytes"] = predicted_bytes(plan) if device.type == "cuda" else None
    return {
        "model": entry.model, "layers": shape.layers, "of_layers": whole.layers, "sequence": entry.sequence,
        "rows": entry.rows, "precision": precision, "contestants": contestants,
    }  # fmt: skip


def _rates(
    figures: dict[str, Any],
    shape: ModelShape,
    entry: StepEntry,
    device: torch.device,
    ceilings: Ceilings,
    precision: str,
) -> None:
    """Tokens per second, and MFU: of the datasheet where it is known, and of the product measured here."""
    if "seconds" not in figures:
        return
    figures["tokens_per_s"] = rate = entry.rows * entry.sequence / figures["seconds"]["median"]
    peaks = {"datasheet": machine.peak_flop_per_s(device, precision, Device(name="local")),
             "measured": ceilings.flop_per_s[precision]}  # fmt: skip
    figures["mfu"] = {
        peak_name: {convention: token_flop(shape, entry.sequence, causal=causal).training * rate / peak
             for convention, causal in (("half", True), ("full", False))}
        for peak_name, peak in peaks.items() if peak
    }  # fmt: skip
