"""Measured deployments as deployments and loads: the conventions of their sources, and rows that cannot be read.

The rows are those of NVIDIA's AIConfigurator (silicon_sample.csv). Most of them are runs of InferenceX, whose
configurations say `tp: 8, ep: 8, dp-attn: true` for one set of 8 GPUs. The table multiplies such degrees (64 GPUs) and
divides the requests in flight by them. Shapes of the models come from their config.json on huggingface.co.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from meshwright.planner.serving.cached_layers import CachedLayers, ServedModel, served
from meshwright.planner.serving.closed_loop import Load
from meshwright.planner.serving.deployment import FRAMEWORKS, Deployment, EngineDegrees, Framework, formats_of
from meshwright.spec import presets
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.model.shape import MLAShape, ModelShape, MoEShape
from meshwright.spec.model.unbuilt_parts import LinearAttention, UnbuiltParts
from meshwright.spec.presets import model

LONGEST = 131072


def _gpt_oss() -> ServedModel:
    """Return openai/gpt-oss-120b: every second layer sees 128 tokens."""
    shape = ModelShape(
        name="gpt-oss-120b", vocab=201088, layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880,
        qkv_bias=True, out_bias=True, max_positions=LONGEST, moe=MoEShape(experts=128, top_k=4, ffn=2880),
    )  # fmt: skip
    return ServedModel(shape, (CachedLayers(18), CachedLayers(18, window=128)))


def _minimax() -> ServedModel:
    """Return MiniMaxAI/MiniMax-M2.5."""
    shape = ModelShape(
        name="minimax-m2.5", vocab=200064, layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, ffn=1536,
        max_positions=LONGEST, moe=MoEShape(experts=256, top_k=8, ffn=1536, scoring="sigmoid"),
    )  # fmt: skip
    return served(shape)


def _kimi() -> ServedModel:
    """Return the language model of moonshotai/Kimi-K2.5."""
    shape = ModelShape(
        name="kimi-k2.5", family="deepseek_v3", vocab=163840, layers=61, hidden=7168, heads=64, ffn=18432,
        max_positions=LONGEST,
        moe=MoEShape(experts=384, top_k=8, ffn=2048, shared_experts=1, first_dense=1, scoring="sigmoid"),
        mla=MLAShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    )  # fmt: skip
    return served(shape)


def _qwen_next() -> ServedModel:
    """Return the language model of Qwen/Qwen3.5-397B-A17B."""
    linear = LinearAttention(full_every=4, key_heads=16, value_heads=64, taps=4)
    shape = ModelShape(
        name="qwen3.5-397b-a17b", vocab=248320, layers=60, hidden=4096, heads=32, kv_heads=2, head_dim=256, ffn=1024,
        max_positions=LONGEST, moe=MoEShape(experts=512, top_k=10, ffn=1024, shared_experts=1),
        unbuilt=UnbuiltParts(linear=linear, gated_attention=True),
    )  # fmt: skip
    return served(shape)


def _glm() -> ServedModel:
    """Return zai-org/GLM-5: attention reads 2,048 positions that an indexer chooses."""
    shape = ModelShape(
        name="glm-5", family="deepseek_v3", vocab=154880, layers=78, hidden=6144, heads=64, ffn=12288,
        max_positions=LONGEST,
        moe=MoEShape(experts=256, top_k=8, ffn=2048, shared_experts=1, first_dense=3, scoring="sigmoid"),
        mla=MLAShape(q_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, v_dim=256),
    )  # fmt: skip
    return served(shape)._replace(selected=2048)


MADE = (
    (r"gpt-oss-120b", _gpt_oss), (r"minimax-m2\.5", _minimax), (r"kimi-k2\.5", _kimi),
    (r"qwen3\.5-397b", _qwen_next), (r"glm-5(?!\.)", _glm),
)  # fmt: skip
PRESETS = (
    (r"deepseek-(r1|v3)(?!\.)", "deepseek-v3"), (r"qwen3-235b", "qwen3-235b-a22b"), (r"qwen3-32b", "qwen3-32b"),
    (r"qwen3-30b", "qwen3-30b-a3b"), (r"qwen3-8b", "qwen3-8b"), (r"llama-3\.1-8b", "llama-3.1-8b"),
    (r"llama-3\.[13]-70b", "llama-3.1-70b"), (r"llama-3\.1-405b", "llama-3.1-405b"),
    (r"mixtral-8x7b", "mixtral-8x7b"), (r"mixtral-8x22b", "mixtral-8x22b"),
)  # fmt: skip


@cache
def served_model(path: str) -> ServedModel | None:
    """Return a model by the end of its path on huggingface.co. None = not known."""
    name = path.rsplit("/", 1)[-1].lower()
    for pattern, made in MADE:
        if re.search(pattern, name):
            return made()
    preset = next((preset for pattern, preset in PRESETS if re.search(pattern, name)), None)
    return served(replace(model(preset), name=name)) if preset else None


DEVICES = {
    "H100-SXM-80": "h100", "H200-SXM": "h200", "B200": "b200", "GB200": "gb200", "B300": "b300", "GB300": "gb300",
}  # fmt: skip
TABLE = "serving_measured.csv"
LARGEST_ENGINE = 8
"""GPUs of a node. Rows with more are several engines whose split is not printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One measured deployment."""

    number: int
    columns: Mapping[str, str]
    decode: Deployment
    """The deployment that decodes. It also reads the prompts if `prefill` is None."""
    prefill: Deployment | None
    load: Load
    """The load of an attention rank of one engine that decodes."""
    workers: tuple[int, int]
    """Engines that read prompts, and engines that decode."""
    first_token_s: float
    per_token_s: float

    @property
    def family(self) -> tuple[str, str, str]:
        """Backend, system, model."""
        model = self.columns["model_path"].rsplit("/", 1)[-1]
        return self.columns["backend"], self.columns["system"], model


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownRow:
    """A row that cannot be planned, and the reason."""

    number: int
    columns: Mapping[str, str]
    reason: str


class _Unknown(Exception):
    pass


def read_serving(path: Path) -> list[ServingRow | UnknownRow]:
    """Read every row of the table, in its order."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(_rows(csv.DictReader(file)))


def _rows(rows: "csv.DictReader[str]") -> Iterator[ServingRow | UnknownRow]:
    for number, columns in enumerate(rows):
        try:
            yield _row(number, columns)
        except (_Unknown, MeshwrightError) as error:
            yield UnknownRow(number=number, columns=columns, reason=str(error))


def _row(number: int, columns: Mapping[str, str]) -> ServingRow:
    model = served_model(columns["model_path"])
    if model is None:
        raise _Unknown(f"model {columns['model_path'].rsplit('/', 1)[-1]} is not known")
    if columns["backend"] not in FRAMEWORKS:
        raise _Unknown(f"backend {columns['backend']} is not known")
    if columns["system"] not in DEVICES:
        raise _Unknown(f"system {columns['system']} is not known")
    framework = _framework(columns)
    apart = columns["mode"] == "disagg"
    if apart and not columns["decode_batch_size"]:
        raise _Unknown("the requests in flight are not given")
    batch, decode = _deployment(columns, model, framework, "decode_" if apart else "")
    prefill = _deployment(columns, model, framework, "prefill_")[1] if apart else None
    if not apart and decode.degrees.gpus > LARGEST_ENGINE:
        raise _Unknown("more GPUs than one engine has, and their split is not given")
    load = Load(
        input_tokens=int(columns["isl"]),
        output_tokens=int(columns["osl"]),
        concurrency=batch,
        spread=SPREAD if (columns["isl"], columns["osl"]) in INFERENCE_X else 0.0,
    )
    return ServingRow(
        number=number, columns=columns, decode=decode, prefill=prefill, load=load,
        workers=(_number(columns, "prefill_num_workers"), _number(columns, "decode_num_workers")),
        first_token_s=float(columns["silicon_ttft_ms"]) / 1e3, per_token_s=float(columns["silicon_tpot_ms"]) / 1e3,
    )  # fmt: skip


INFERENCE_X = {("1024", "1024"), ("1024", "8192"), ("8192", "1024")}
"""(input, output) lengths of its runs."""
SPREAD = 0.2
"""Spread of lengths: InferenceX draws them between 0.8 and 1 of those in its title (random_range_ratio)."""


def _framework(columns: Mapping[str, str]) -> Framework:
    """Return the framework with the options of the runs' launch scripts (InferenceX benchmarks/single_node)."""
    framework = FRAMEWORKS[columns["backend"]]
    if framework.name == "vllm" and "MiniMax" in columns["model_path"]:
        return framework._replace(budget=2 * int(columns["isl"]))
    lengths = columns["isl"], columns["osl"]
    if framework.name == "trtllm" and lengths not in INFERENCE_X and columns["batch_size"]:
        return framework._replace(budget=int(columns["isl"]) + int(columns["batch_size"]))
    if framework.name == "sglang" and lengths in INFERENCE_X and columns["system"] in ("B200", "B300"):
        return framework._replace(receive_every=30 if float(columns["batch_size"] or 1) >= 16 else 10)
    return framework


def _number(columns: Mapping[str, str], name: str) -> int:
    """Return a degree. An empty one, or 0, is 1."""
    return max(1, int(columns[name] or 1))


def _deployment(
    columns: Mapping[str, str], model: ServedModel, framework: Framework, prefix: str
) -> tuple[float, Deployment]:
    """Return (requests in flight of an attention rank, one engine)."""
    tp, dp = _number(columns, prefix + "tp_size"), _number(columns, prefix + "attention_dp_size")
    expert_tp, expert_ep = _number(columns, prefix + "moe_tp_size"), _number(columns, prefix + "moe_ep_size")
    batch = float(columns[prefix + "batch_size"])
    degrees = EngineDegrees(tp=tp, attention_dp=dp)
    if model.shape.moe:
        in_flight = batch * dp
        one_set = bool(columns[prefix + "attention_dp_size"])
        degrees = _degrees(tp, dp, expert_tp, expert_ep, one_set=one_set)
        batch = in_flight / degrees.attention_dp
    device = presets.device(DEVICES[columns["system"]])
    width = 2.0 if columns["precision"] in ("", "bf16") else 1.0
    return batch, Deployment(
        model=model, device=device, degrees=degrees, framework=framework,
        formats=formats_of(columns["gemm_quant_mode"] or "bf16", experts=model.shape.moe is not None),
        cache_width=width, drafted=_drafted(columns, degrees),
        per_node=72 if device.name.startswith("GB") else 8,
    )  # fmt: skip


def _degrees(tp: int, dp: int, expert_tp: int, expert_ep: int, *, one_set: bool) -> EngineDegrees:
    """Return the degrees of one engine.

    `one_set`: the row is of InferenceX, which alone names attention data parallelism. Its degrees are each of one set
    of GPUs.
    """
    gpus = tp * dp
    if one_set and expert_tp == expert_ep > 1 and gpus == expert_tp**2:  # tp: 8, ep: 8 of the same 8 GPUs
        apart = dp > 1
        return EngineDegrees(tp=1 if apart else expert_tp, attention_dp=expert_tp if apart else 1, expert_ep=expert_tp)
    if one_set and tp == dp > 1 and expert_ep == gpus:  # tp: 4, ep: 4, dp-attn: true of the same 4 GPUs
        return EngineDegrees(tp=1, attention_dp=dp, expert_ep=dp)
    if expert_tp * expert_ep != gpus:  # experts' degrees are left out
        return EngineDegrees(tp=tp, attention_dp=dp, expert_tp=gpus)
    return EngineDegrees(tp=tp, attention_dp=dp, expert_tp=expert_tp, expert_ep=expert_ep)


DRAFTING = (("1.2.0rc6.post3", 1), ("1.1.0rc2.post2", 2))
"""(version of TensorRT-LLM, least expert parallel degree) with multi-token prediction.
InferenceX ran DeepSeek-R1 so (configs/nvidia-master.yaml of 2026-02 to 2026-05).
"""


def _drafted(columns: Mapping[str, str], degrees: EngineDegrees) -> int:
    """Return the tokens that are drafted in a step: 3, or 1 with attention data parallelism."""
    if columns["backend"] != "trtllm" or "DeepSeek-R1" not in columns["model_path"]:
        return 0
    if any(columns["backend_version"] == version and degrees.expert_ep >= least for version, least in DRAFTING):
        return 1 if degrees.attention_dp > 1 else 3
    return 0


ACCEPTED = {0: 1.0, 1: 1.7, 3: 2.4}
"""Drafted tokens -> tokens per step. Published runs print no acceptance."""
