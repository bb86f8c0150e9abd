"""Columns of a published run -> Plan and Stack. ValueError or a MeshwrightError says what the row leaves open."""

import re
from dataclasses import replace
from functools import cache
from math import lcm

from meshwright.planner.accuracy.published_models import gpt, shape_named, tied_by_count
from meshwright.planner.accuracy.published_stacks import HAI_LLM, NANOTRON, run_of_sweep, stack_of
from meshwright.planner.cost.stack import Stack
from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import stage_layers
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts
from meshwright.spec.plan.plan import Plan
from meshwright.spec.presets import device
from meshwright.spec.recipe.recipe import Recipe

DEVICES = (
    (r"a100.?(sxm.?)?-?40", "a100-40"), (r"a100", "a100-80"), (r"h100-sxm-96", "h100-96"), (r"gb200", "gb200"),
    (r"gb300", "gb300"), (r"b200", "b200"), (r"b300", "b300"), (r"h100", "h100"), (r"h200", "h200"), (r"h800", "h800"),
    (r"mi300x", "mi300x"), (r"mi325x", "mi325x"), (r"mi355x", "mi355x"),
)  # fmt: skip
"""(pattern of a row's hardware, device preset). The first match counts."""
DOMAIN = {"gb200": 64, "gb300": 64}
"""Devices that links join, if not eight: of the 72 in a rack (NVL72), powers of two use 64."""
SIZES = ("hidden", "layers", "heads", "ffn", "vocab")
DESCRIBED = {
    "gpt-22b": (4, 1, 1, 4), "gpt-175b": (1, 8, 3, 64), "gpt-530b": (1, 35, 3, 280), "gpt-1t": (1, 64, 1, 512),
}  # fmt: skip
"""(micro-batch, pp, vp, global batch of one replica) of Korthikanti et al. 2022, table 3, for rows of its figures."""
LOCAL_BATCH = {"llama3_h100_202412_torchtitan.md T5": 32, "llama3_h100_202412_torchtitan.md T6": 8}
"""Sequences of one replica in a step, from the headings of torchtitan's tables."""


def number(columns: dict[str, str], name: str, default: float | None = None) -> float:
    """Return the number in a column. Raises ValueError without one or a default, or if no run can have it."""
    text = (columns.get(name) or "").strip()
    if re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text):
        figure = float(text)
        if not 0 <= figure < 1e15:
            raise ValueError(f"{name}={text} is no figure of a run")
        return figure
    if default is None:
        raise ValueError(f"{name}={text!r} is no number")
    return default


def whole(columns: dict[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number, as `number` does."""
    figure = number(columns, name, default)
    if figure != int(figure):
        raise ValueError(f"{name}={figure} is no whole number")
    return int(figure)


def plan_of(columns: dict[str, str]) -> tuple[Plan, Stack]:
    """Return the plan that was run, and its software."""
    devices = _devices(columns)
    gpu = columns.get("gpu") or ("A100-SXM-80" if _described(columns) else "")
    cluster = _cluster(gpu, f"{columns['source']} {columns.get('notes', '')}", devices)
    if not columns.get("precision"):
        # Megatron-Bridge's rates there are up to 0.96 of the best bf16 product; others that name none are papers' runs.
        columns = {**columns, "precision": "FP8" if "Megatron-Bridge" in columns["framework"] else "bf16"}
    stack, changes = stack_of(columns)
    _trainable(columns)
    sequence = whole(columns, "seq_len", 2048 if _described(columns) else None)
    shape = _shape_of(columns, sequence)
    if stack.name == HAI_LLM.name:
        shape = replace(shape, unbuilt=UnbuiltParts(predicts=1))  # DeepSeek-V3 report, section 4.2
    layout, batch = _layout(columns, shape, devices, cluster)
    if stack == NANOTRON and "benchmarks_interactive" in columns["source"]:
        stack = run_of_sweep(layout, number(columns, "params_b", 0.0))
    recipe = Recipe(sequence=sequence, global_batch=batch, precision="bf16")
    layout = replace(layout, **changes)  # type: ignore[arg-type]  # fields of Layout, from `stack_of`
    if layout.vp * layout.pp > shape.layers and layout.vp * layout.pp <= shape.layers + 2:
        # Llama 3: the first and the last stage have a layer less, and embedding and head instead.
        shape = replace(shape, layers=layout.vp * layout.pp)
    layout.micro_batches(batch)
    stage_layers(shape.layers, layout.pp * layout.vp)
    return Plan(model=shape, recipe=recipe, layout=layout, cluster=cluster), stack


def _described(columns: dict[str, str]) -> tuple[int, int, int, int] | None:
    if "korthikanti" not in columns["source"].lower():
        return None
    return DESCRIBED.get(columns["model"].lower())


def _devices(columns: dict[str, str]) -> int:
    described = _described(columns)
    default = whole(columns, "tp", 1) * described[1] if described else None
    devices = whole(columns, "n_gpus", default)
    if not 1 <= devices <= 10**6:
        raise ValueError(f"n_gpus={devices} is no number of devices")
    return devices


def _trainable(columns: dict[str, str]) -> None:
    if "lora" in f"{columns.get('notes', '')} {columns['source']} {columns['model']}".lower():
        raise ValueError("LoRA: most weights are frozen, which the planner does not count yet")


def _layout(columns: dict[str, str], shape: ModelShape, devices: int, cluster: Cluster) -> tuple[Layout, int]:
    described = _described(columns)
    tp, cp = (whole(columns, axis, 1) for axis in ("tp", "cp"))
    pp = whole(columns, "pp", described[1] if described else 1)
    if not (columns.get("tp") or described):
        raise ValueError("gives no layout (tp, pp, dp)")
    dp = whole(columns, "dp", max(1, devices // max(1, tp * pp * cp)))
    if tp * pp * cp * dp != devices:
        raise ValueError(f"contradicts itself: tp={tp} x pp={pp} x cp={cp} x dp={dp} is not n_gpus={devices}")
    micro, batch = _batch(columns, dp, described)
    zero, sharded = _zero(columns.get("zero_stage", "")), dp * cp > 1
    copies = (
        devices // (tp * cp * pp * cluster.devices_per_node) if "hsdp" in columns.get("zero_stage", "").lower() else 1
    )
    copies = copies if copies > 1 and dp % copies == 0 else 1
    dual = pp > 1 and "dualpipe" in columns.get("schedule", "").lower()
    vp = 2 if dual else _virtual(columns, shape, pp, described)
    shard = dp // copies if sharded and zero else 1
    recompute = columns.get("recompute", "")
    if "primus" in columns["framework"].lower() and not recompute and "70b" in columns["model"].lower():
        recompute = "full"  # examples/megatron/configs/MI300X/llama3.1_70B-{BF16,FP8}-pretrain.yaml: all 80 layers
    if "fms-fsdp" in columns["framework"] and "selective" in recompute:
        # Selective means some blocks wholly, others not. HFU over MFU, at most 4/3, tells how many.
        recompute = "full" if number(columns, "hfu_pct") > 7 / 6 * number(columns, "mfu_pct") else "none"
    layout = Layout(
        dp_shard=shard,
        dp_replicate=dp // shard,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=_experts(columns, shape, dp * cp * tp),
        vp=vp,
        zero=zero if sharded else 0,  # type: ignore[arg-type]  # 0 to 3
        sp=tp > 1 and _sequence_parallel(columns.get("sp", ""), recompute),
        schedule="dualpipe-v" if dual else "interleaved" if vp > 1 else "1f1b",
        micro_batch=micro,
        recompute=_recompute(recompute, devices),  # type: ignore[arg-type]  # one of the words that Layout allows
    )
    return layout, batch


def _batch(columns: dict[str, str], dp: int, described: tuple[int, int, int, int] | None) -> tuple[int, int]:
    """Return (sequences of a micro-batch, of a step)."""
    stated = columns.get("micro_batch", "")[:1].isdigit()
    micro = whole(columns, "micro_batch") if stated else described[0] if described else 0
    steps = whole(columns, "grad_acc", 0)
    batch = whole(columns, "global_batch_seqs", described[3] * dp if described else 0)
    if not micro and (match := re.search(r"max batch fitting = (\d+)", columns.get("notes", ""))):
        micro = batch = int(match[1])  # curves of the Ultra-Scale Playbook: one replica, one micro-batch a step
    if not batch:
        batch = dp * next((n for name, n in LOCAL_BATCH.items() if name in columns["source"]), 0)
    if not micro and "torchtitan" in columns["framework"]:
        micro = batch // (dp * whole(columns, "pp", 1))  # torchtitan's own default: as many as there are ranks
    if not batch and "quantity" in columns:
        # Tables of memory print no batch; the peak does not depend on it once a pipeline is full.
        micro = micro or 1
        batch = micro * dp * lcm(4, max(1, whole(columns, "pp", 1)))
    if not batch and micro and columns.get("tok_s_gpu") and whole(columns, "pp", 1) == 1:
        batch = micro * dp  # tokens/s are printed, and without a pipeline they hardly depend on it
    batch = batch or micro * dp * steps
    if not batch:
        raise ValueError("gives neither a global batch nor micro-batch and accumulation")
    if not micro:
        micro = batch // (dp * steps) if steps else 1
    return micro, batch


def _virtual(columns: dict[str, str], shape: ModelShape, pp: int, described: tuple[int, int, int, int] | None) -> int:
    """Return the stages per pipeline rank. `~8` is 8; a bare `interleaved` leaves a choice.

    Megatron-Core's table has 92 layers on 4 ranks, which interleave only with one layer a stage, so all its rows are
    read that way. The runs of 2021, whose table names the schedule for all, are read as the coarsest that interleaves.
    """
    text = columns.get("vpp", "").strip()
    if pp == 1:
        return 1
    if described and not text:
        return described[2]
    if match := re.match(r"~?(\d+)", text):
        return int(match[1])
    if "interleaved" not in text + columns.get("schedule", "") or shape.layers % pp:
        return 1
    per_rank = shape.layers // pp
    return next((v for v in range(2, per_rank + 1) if per_rank % v == 0), 1) if text else per_rank


def _experts(columns: dict[str, str], shape: ModelShape, ranks: int) -> int:
    """Return the degree of expert parallelism. A dense model has 1, whatever the column says."""
    ep = whole(columns, "ep", 1)
    if shape.moe is None:
        return 1
    if shape.moe.experts % ep or ranks % ep:
        raise ValueError(f"ep={ep} divides neither {shape.moe.experts} experts nor {ranks} ranks")
    return ep


def _zero(text: str) -> int:
    if "hsdp" in text.lower() or ("fsdp" in text.lower() and "2" not in text):
        return 3
    match = re.search(r"[0-3]", text)
    return int(match[0]) if match else 0


def _sequence_parallel(flag: str, recompute: str) -> bool:
    """Read the column, or without one, the names of the bars in Korthikanti's figures."""
    if flag.strip():
        return flag.strip() == "1"
    return bool(re.search(r"\bSP\b", recompute)) and "no SP" not in recompute


def _recompute(text: str, devices: int) -> str:
    text = text.lower()
    if "validation configs" in text and devices <= 8:
        return "none"  # a layer's time of those runs has no room for another forward pass: docs/accuracy.md
    if "selective" in text:
        return "selective"
    return "full" if text.startswith(("full", "every", "1", "true", "yes")) else "none"


def _shape_of(columns: dict[str, str], sequence: int) -> ModelShape:
    if not columns.get("model"):
        raise ValueError("names no model")
    sizes = tuple(whole(columns, name) for name in SIZES if columns.get(name))
    if len(sizes) < len(SIZES):
        named = shape_named(columns["model"], sequence)
        if named is None:
            raise ValueError(f"model={columns['model']!r}: its sizes are neither in the row nor known by that name")
        return named
    if "vocab assumed" in columns.get("notes", ""):
        sizes = (*sizes[:-1], 50257)  # VIA-Research/vTrain src/config.py
    heads = whole(columns, "kv_heads", sizes[2])
    return _shape(columns["model"], sizes, heads, number(columns, "params_b", 0.0), sequence)


@cache
def _shape(name: str, sizes: tuple[int, ...], kv_heads: int, billions: float, sequence: int) -> ModelShape:
    hidden, layers, heads, ffn, vocab = sizes
    plain = name.lower()
    if "gpt" in plain or "mpt" in plain:
        shape = gpt(name, layers, hidden, heads, vocab=vocab, positions=sequence, ffn=ffn)
        return replace(shape, kv_heads=kv_heads)
    shape = ModelShape(
        name=name, vocab=vocab, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        max_positions=max(sequence, 2048),
    )  # fmt: skip
    return tied_by_count(shape, billions * 1e9) if billions else shape


@cache
def _cluster(gpu: str, notes: str, devices: int) -> Cluster:
    """Return the cluster. A node has eight devices, or as many as links join. The row's network is per node."""
    plain = gpu.lower().replace(" ", "-").replace("_", "-").replace("dgx-", "")
    name = next((preset for pattern, preset in DEVICES if re.search(pattern, plain)), "")
    if not name:
        raise ValueError(f"gpu={gpu!r} is no device whose figures are known")
    per_node = min(devices, DOMAIN.get(name, 8))
    known = device(name)
    if match := re.search(r"(\d+) ?Gb(?:ps|/s)", f"{gpu} {notes}"):
        known = replace(known, network_bytes_per_s=int(match[1]) * 1e9 / 8 / 8)
    return Cluster(device=known, devices_per_node=per_node, nodes=max(1, -(-devices // per_node)))
