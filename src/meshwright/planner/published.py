"""Published measurements: a row of a CSV -> the plan that was run, the software it ran on, what was measured.

Columns as in the project's tables of published runs: model sizes, layout, hardware, step time, tokens/s, peak memory,
status. A row that does not say enough is not guessed at: `read` gives the reason instead.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.planner.stack import Stack
from meshwright.planner.stacks import stack_of
from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.errors import DataError, MeshwrightError
from meshwright.spec.flop import token_flop
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.presets import device, model
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import stage_layers
from meshwright.spec.shape import ModelShape

DEVICES = (
    ("a100_40", "a100-40"), ("a100-sxm-40", "a100-40"), ("a100-40", "a100-40"), ("a100", "a100-80"),
    ("h100-sxm-96", "h100-96"), ("gh200", "gh200"), ("gb200", "gb200"), ("gb300", "gb300"), ("b200", "b200"),
    ("b300", "b300"), ("h100", "h100"), ("h200", "h200"), ("h800", "h800"), ("mi300x", "mi300x"),
    ("mi325x", "mi325x"), ("mi355x", "mi355x"),
)  # fmt: skip
"""Beginning of (or word in) a row's hardware -> device preset; the first that is found."""
ROUTED = (
    ("DeepSeekV3", "deepseek-v3"), ("Qwen3_30B_a3B", "qwen3-30b-a3b"), ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
)  # fmt: skip
"""Beginning of a row's model -> preset that has the shape it leaves out."""
FRACTION = {"GiB": 2**30, "GB": 2**30}
"""Published peaks are torch's, printed with either name and meaning 2**30 (research notes, section 8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run."""

    source: str
    plan: Plan
    stack: Stack
    step_s: float
    """0 = not given."""
    peak_bytes: float
    """0 = not given."""
    out_of_memory: bool
    convention: str
    columns: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A row that does not say enough, and why."""

    source: str
    reason: str
    columns: dict[str, str]


def read(path: Path) -> Iterator[Row | Unreadable]:
    """The rows of a file; DataError where it is no such table."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = {"source", "layers", "hidden", "n_gpus", "gpu", "seq_len"} - set(table.fieldnames or ())
            if missing:
                raise DataError(f"{path} lacks the columns {', '.join(sorted(missing))}: it is no table of runs")
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from None
    for columns in rows:
        yield _row(columns)


def _row(columns: dict[str, str]) -> Row | Unreadable:
    source = columns["source"]
    try:
        plan, stack = _plan(columns)
        plan.layout.micro_batches(plan.recipe.global_batch)
        stage_layers(plan.model.layers, plan.layout.pp * plan.layout.vp)
    except (ValueError, MeshwrightError) as error:
        return Unreadable(source=source, reason=str(error), columns=columns)
    failed = columns.get("status", "ok") != "ok"
    return Row(
        source=source,
        plan=plan,
        stack=stack,
        step_s=0.0 if failed else _step_s(columns, plan),
        peak_bytes=0.0 if failed else number(columns, "peak_mem_gb", 0.0) * 2**30,
        out_of_memory=failed and "oom" in columns["status"].lower(),
        convention=columns.get("flops_convention", ""),
        columns=columns,
    )


def number(columns: dict[str, str], name: str, default: float | None = None) -> float:
    """A column's number; ValueError where it holds none and there is no default."""
    text = (columns.get(name) or "").strip()
    if re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text):
        return float(text)
    if default is None:
        raise ValueError(f"{name}={text!r} is no number")
    return default


def _step_s(columns: dict[str, str], plan: Plan) -> float:
    given = number(columns, "step_time_s", 0.0)
    if given:
        return given
    rate = number(columns, "tok_s_gpu", 0.0)
    tokens = plan.recipe.global_batch * plan.recipe.sequence
    if not rate:  # all that print FLOP/s alone count attention without the causal half (research notes, 4.2)
        flop = token_flop(plan.model, plan.recipe.sequence, causal=False).training
        rate = number(columns, "tflops_gpu", 0.0) * 1e12 / flop
    return tokens / (rate * plan.layout.world) if rate else 0.0


def _whole(columns: dict[str, str], name: str, default: int | None = None) -> int:
    value = number(columns, name, default)
    if value != int(value):
        raise ValueError(f"{name}={value} is no whole number")
    return int(value)


def _plan(columns: dict[str, str]) -> tuple[Plan, Stack]:
    shape = _shape(columns)
    devices = _whole(columns, "n_gpus")
    tp, pp, cp = (_whole(columns, axis, 1) for axis in ("tp", "pp", "cp"))
    dp = _whole(columns, "dp", max(1, devices // (tp * pp * cp)))
    if tp * pp * cp * dp != devices:
        raise ValueError(f"tp={tp} x pp={pp} x cp={cp} x dp={dp} is not n_gpus={devices}")
    zero = int((re.search(r"\d", columns.get("zero_stage") or "") or ["0"])[0])
    micro = _whole(columns, "micro_batch", 0)
    batch = _whole(columns, "global_batch_seqs", micro * dp * _whole(columns, "grad_acc", 1))
    if not micro:
        micro = batch // (dp * _whole(columns, "grad_acc", 0)) if _whole(columns, "grad_acc", 0) else 1
    vp = _virtual(columns, shape.layers, pp)
    stack, changes = stack_of(columns)
    sharded = dp * cp > 1 and zero > 0
    layout = Layout(
        dp_shard=dp if sharded else 1,
        dp_replicate=1 if sharded else dp,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=_whole(columns, "ep", 1),
        vp=vp if pp > 1 else 1,
        zero=zero if sharded else 0,  # type: ignore[arg-type]
        sp=tp > 1 and (columns.get("sp") or "0").strip() == "1",
        schedule="interleaved" if vp > 1 and pp > 1 else "1f1b",
        micro_batch=micro,
        recompute=_recompute(columns, devices),
    )
    recipe = Recipe(sequence=_whole(columns, "seq_len"), global_batch=batch, precision="bf16")
    return Plan(
        model=shape, recipe=recipe, layout=replace(layout, **changes), cluster=_cluster(columns, devices)
    ), stack


def _virtual(columns: dict[str, str], layers: int, pp: int) -> int:
    """Stages of a rank. Where `interleaved` is all that is said, a layer each: 92 layers on 4 ranks leave no other."""
    text = (columns.get("vpp") or "").strip()
    about = re.match(r"~(\d+)", text)
    if about:
        return min(int(about[1]), layers // pp)
    if not text and pp > 1 and "interleaved" in (columns.get("schedule") or ""):
        return layers // pp
    return _whole(columns, "vpp", 1)


def _recompute(columns: dict[str, str], devices: int) -> str:
    text = (columns.get("recompute") or "none").lower()
    if "validation configs" in text and devices <= 8:
        return "none"  # a layer's time of those runs has no room for another forward pass: docs/accuracy.md
    if "selective" in text:
        return "selective"
    return "full" if text.startswith(("full", "every", "1", "true")) else "none"


def _shape(columns: dict[str, str]) -> ModelShape:
    if "lora" in (columns["model"] + (columns.get("notes") or "")).lower():
        raise ValueError("most weights are frozen (LoRA): such runs are not planned")
    preset = next((name for word, name in ROUTED if columns["model"].startswith(word)), "")
    if preset and not columns.get("hidden"):
        return model(preset)
    llama = "gpt" not in columns["model"].lower() and "mpt" not in columns["model"].lower()
    hidden, heads = _whole(columns, "hidden"), _whole(columns, "heads")
    return ModelShape(
        name=columns["model"],
        family="llama" if llama else "gpt2",
        vocab=50257 if "vocab assumed" in (columns.get("notes") or "") else _whole(columns, "vocab"),  # src/config.py
        layers=_whole(columns, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(columns, "kv_heads", heads),
        ffn=_whole(columns, "ffn"),
        norm="rmsnorm" if llama else "layernorm",
        mlp="swiglu" if llama else "gelu_tanh",
        positions="rope" if llama else "learned",
        max_positions=max(_whole(columns, "seq_len"), 2048),
        qkv_bias=not llama,
        out_bias=not llama,
        mlp_bias=not llama,
        tied=not llama,
    )


def _cluster(columns: dict[str, str], devices: int) -> Cluster:
    text = columns["gpu"].lower().replace(" ", "-").replace("dgx-", "")
    name = next((preset for word, preset in DEVICES if word in text), "")
    if not name:
        raise ValueError(f"gpu={columns['gpu']!r} is no device whose figures are known")
    domain = 72 if name.startswith("gb") else 8
    per_node = max(n for n in range(1, domain + 1) if devices % n == 0)
    return Cluster(device=_network(device(name), columns), devices_per_node=per_node, nodes=max(1, devices // per_node))


def _network(device: Device, columns: dict[str, str]) -> Device:
    """With the network that a row names: `N Gb/s inter-node` of a node of eight."""
    found = re.search(r"(\d+) Gb/s inter-node", columns.get("notes") or "")
    return replace(device, network_bytes_per_s=float(found[1]) * 1e9 / 8 / 8) if found else device
