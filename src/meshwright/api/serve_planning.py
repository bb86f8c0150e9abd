"""`plan --serve`: memory, concurrency and speed of a served model, by tensor parallel. Needs no torch, no GPU."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.answer import Answer
from meshwright.api.arguments import HasPlan, checked
from meshwright.api.markup import line, table, whole
from meshwright.api.plan_request import asked_plan
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.machine.clusterfile import asked as measured
from meshwright.planner.machine.clusterfile import is_file
from meshwright.planner.serving.cached_layers import elements_per_position, served
from meshwright.planner.serving.closed_loop import Load
from meshwright.planner.serving.deployment import Deployment
from meshwright.planner.serving.engine_kernels import EngineKernels
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.planner.serving.frameworks import FRAMEWORKS, MESHWRIGHT, VLLM, Framework, meshwright_on
from meshwright.planner.serving.measured_kernels import MeasuredKernels
from meshwright.planner.serving.number_formats import FORMATS, formats_of
from meshwright.planner.serving.serving_memory import weights_bytes
from meshwright.planner.serving.serving_plan import (
    CurvePoint,
    ServingAsked,
    ServingLayout,
    Timed,
    curve,
    layouts,
    smallest_format,
)
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec import Cluster, Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit, PlanError
from meshwright.spec.inventory import num_parameters
from meshwright.spec.lora import LoRAShape
from meshwright.spec.serving_defaults import BESIDE_ANSWERS
from meshwright.spec.units import gib

if TYPE_CHECKING:
    from meshwright.api.serving_load import ServingColumns
    from meshwright.model import Transformer

CACHE_WIDTHS: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Dtype of keys and values -> bytes of a number."""
NARROWER = ("fp8", "int4_wo")
"""Formats that are tried where weights are too large."""
MOST_TOKENS, MOST_REQUESTS = 10**7, 10**6


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingAnswer(Answer):
    """The layouts of a served model that fit, most tokens per second first."""

    layouts: tuple[ServingLayout, ...]
    timed: Timed
    quantization: str
    kv_dtype: str

    @property
    def asked(self) -> ServingAsked:
        """Model, cluster and load."""
        return self.layouts[0].asked

    @property
    def best(self) -> ServingLayout:
        """The recommended one: most tokens per second at the asked load, among those that hold all its requests."""
        return self.layouts[0]

    @property
    def fitting(self) -> tuple[ServingLayout, ...]:
        """Those that hold at least one sequence."""
        return tuple(one for one in self.layouts if one.fits)

    @cached_property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Throughput against latency of the recommended layout, over requests in flight."""
        return tuple(curve(self.best, self.timed))

    @property
    def parameters(self) -> int:
        """Of the model."""
        return num_parameters(self.asked.model.shape)

    @property
    def bytes_per_parameter(self) -> float:
        """Of all GPUs of one engine: weights, and the cache of the requests it serves."""
        best = self.best
        sequences = min(self.asked.concurrency / best.engines, best.memory.most_sequences * best.degrees.attention_dp)
        ranks = best.degrees.tp
        held = best.memory.weights_bytes * best.degrees.gpus + sequences * ranks * best.memory.sequence_bytes
        return held / self.parameters

    def measure(self, waves: int = 4, model: "Transformer | None" = None) -> "ServingColumns":
        """Run the load here through Meshwright's own engine in fp32, with `model` or with weights of chance: planned,
        dry run and measured. `waves`: requests per place in flight. ArgumentError where another machine or engine is
        planned."""
        from meshwright.api.serving_load import columns

        of = self.best.deployment
        if of.framework.name != MESHWRIGHT.name or of.device.is_gpu or self.quantization != "fp32":
            raise ArgumentError(
                "measure runs Meshwright's engine on this machine in fp32: plan with cluster=FILE.toml of calibrate"
            )
        load = Load(
            input_tokens=self.asked.input_tokens, output_tokens=self.asked.output_tokens,
            concurrency=self.asked.concurrency, waves=waves,
        )  # fmt: skip
        return columns(self.timed(of), load, model)

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright plan --serve --json` prints."""
        asked = self.asked
        return {
            "kind": "serving plan",
            "model": asked.model.shape.name,
            "parameters": self.parameters,
            "cluster": {
                "device": asked.cluster.device.name, "devices_per_node": asked.cluster.devices_per_node,
                "nodes": asked.cluster.nodes},
            "framework": asked.framework.name,
            "quantization": self.quantization,
            "kv_dtype": self.kv_dtype,
            "input_length": asked.input_tokens,
            "output_length": asked.output_tokens,
            "concurrency": asked.concurrency,
            "adapters": asked.adapters,
            "cache_elements_per_layer_and_token": elements_per_position(asked.model.shape),
            "bytes_per_parameter": self.bytes_per_parameter,
            "best": row_of(self.best),
            "alternatives": [row_of(one) for one in self.fitting[1:]],
            "does_not_fit": [row_of(one) for one in self.layouts if not one.fits],
            "curve": [asdict(one) for one in self.curve],
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layout, the recommended one first."""
        return [row_of(one) for one in self.layouts]

    def __repr__(self) -> str:
        best, asked = self.best, self.asked
        assert best.served is not None
        return (
            f"{asked.model.shape.name} served on {asked.cluster.devices} {asked.cluster.device.name}: {best.words}, "
            f"{best.served.first_token_s * 1e3:.0f} ms to the first token, {best.served.per_token_s * 1e3:.1f} ms per "
            f"token, {best.tokens_per_s:,.0f} tokens/s, {best.most_requests:,.0f} requests at most"
        )

    def _repr_html_(self) -> str:
        cells = [
            (one.words, f"{one.served.first_token_s * 1e3:.0f} ms", f"{one.served.per_token_s * 1e3:.1f} ms",
             f"{one.tokens_per_s_per_gpu:,.0f}", gib(one.memory.weights_bytes), f"{one.most_requests:,.0f}")
            for one in self.fitting if one.served
        ]  # fmt: skip
        heads = ("layout", "first token", "per token", "tokens/s per GPU", "weights", "requests at most")
        return whole(line(repr(self)), table(heads, cells))


def row_of(one: ServingLayout) -> dict[str, Any]:
    """Of one layout, in plain units."""
    served_, memory = one.served, one.memory
    return {
        "layout": one.words, **asdict(one.degrees), "engines": one.engines, "fits": one.fits,
        "first_token_seconds": served_.first_token_s if served_ else None,
        "per_token_seconds": served_.per_token_s if served_ else None,
        "tokens_per_second": one.tokens_per_s if served_ else None,
        "tokens_per_second_per_gpu": one.tokens_per_s_per_gpu if served_ else None,
        "weights_bytes": round(memory.weights_bytes), "adapters_bytes": round(memory.adapters_bytes),
        "activations_bytes": round(memory.activations_bytes), "copies_bytes": round(memory.copies_bytes),
        "graphs_bytes": round(memory.graphs_bytes), "waits": one.waits,
        "cache_bytes": _whole(memory.cache_bytes), "cache_bytes_per_token": round(memory.position_bytes),
        "cache_bytes_per_sequence": round(memory.sequence_bytes), "most_requests": _whole(one.most_requests),
    }  # fmt: skip


def _whole(value: float) -> int | None:
    return None if value == float("inf") else round(value)


@checked
def plan_serving(
    model: str | Path | Plan | HasPlan,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    input_length: int = 1024,
    output_length: int = 1024,
    concurrency: int = 64,
    quantization: str = "",
    kv_dtype: str = "",
    framework: str = "",
    tp: int = 0,
    adapters: int = 0,
    adapter_rank: int = 16,
    adapter_targets: str = "all",
) -> ServingAnswer:
    """Memory, concurrency and speed of a served model, for layouts by tensor parallel.

    `model`, `cluster`, `nodes`: as for `plan`. `input_length`, `output_length`: tokens of a request; `concurrency`:
    requests in flight on the whole cluster. `quantization`: bf16, fp8, nvfp4, int4_wo or a scheme of `quantize`;
    `kv_dtype`: of keys and values. By default both are bf16, and fp32 on a measured machine. `framework`: vllm, sglang,
    trtllm or meshwright. `tp`: this degree alone. `adapters`: so many of `adapter_rank` on `adapter_targets` (as
    model.lora) are held beside the model; they take memory, and their time is not planned.

    DoesNotFit where no layout holds one sequence. PlanError for what makes no sense.
    """
    plan = asked_plan(model, cluster, nodes, ())
    own = cluster if cluster is not None and is_file(cluster) else None
    plain = "fp32" if own else "bf16"
    quantization, kv_dtype = quantization or plain, kv_dtype or plain
    asked, timed = asked_load(
        plan, own, input_length=input_length, output_length=output_length, concurrency=concurrency,
        quantization=quantization, kv_dtype=kv_dtype, framework=framework,
    )  # fmt: skip
    if adapters:
        lora = _adapter(asked, adapters, adapter_rank, adapter_targets)
        asked = replace(asked, adapters=adapters, adapter=lora)
    found = layouts(asked, timed, tp)
    if not found:
        raise ArgumentError(
            f"tp={tp} does not divide both {plan.model.name} and a node of {plan.cluster.devices_per_node} "
            "devices: leave it out to see what does"
        )
    answer = ServingAnswer(layouts=tuple(found), timed=timed, quantization=quantization, kv_dtype=kv_dtype)
    if not answer.fitting:
        raise _does_not_fit(answer)
    holding = [one for one in found if one.fits and not one.waits]
    if holding and holding[0] is not found[0]:
        found.remove(holding[0])
        answer = replace(answer, layouts=(holding[0], *found))
    return answer


def asked_load(
    plan: Plan,
    own: str | None,
    *,
    input_length: int,
    output_length: int,
    concurrency: int,
    quantization: str,
    kv_dtype: str,
    framework: str,
) -> tuple[ServingAsked, Timed]:
    """What is asked of a plan's model and cluster, and the times of its steps. `own`: the file of a measured machine.
    ArgumentError where something makes no sense."""
    _check_range("input_length", input_length, MOST_TOKENS)
    _check_range("output_length", output_length, MOST_TOKENS)
    _check_range("concurrency", concurrency, MOST_REQUESTS)
    if kv_dtype not in CACHE_WIDTHS:
        raise ArgumentError(f"kv_dtype={kv_dtype!r} is not known: take one of {', '.join(CACHE_WIDTHS)}")
    rules, timed = _rules(framework, plan, own)
    asked = ServingAsked(
        model=served(plan.model.base), cluster=plan.cluster, framework=rules,
        formats=formats_of(quantization, experts=plan.model.moe is not None), cache_width=CACHE_WIDTHS[kv_dtype],
        input_tokens=input_length, output_tokens=output_length, concurrency=concurrency,
    )  # fmt: skip
    if asked.length > plan.model.max_positions:
        raise ArgumentError(
            f"input_length={input_length} + output_length={output_length} exceed the {plan.model.max_positions:,} "
            f"positions of {plan.model.name}: shorten one"
        )
    return asked, timed


def _rules(name: str, plan: Plan, cluster: str | None) -> tuple[Framework, Timed]:
    """Of a framework, with the times of a measured machine where `cluster` is its file."""
    own = meshwright_on(plan.cluster.device, plan.model.hidden)
    known = {**FRAMEWORKS, own.name: own}
    if name and name not in known:
        raise ArgumentError(f"framework={name!r} is not known: take one of {', '.join(known)}")
    if cluster is None:
        return known[name or VLLM.name], StepTimes
    if name not in ("", MESHWRIGHT.name):
        raise ArgumentError(f"framework={name}: a measured machine runs Meshwright's own engine: framework=meshwright")
    return own, measured_times(cluster, plan)


def measured_times(cluster: str, plan: Plan) -> Callable[[Deployment], StepTimes]:
    """Steps of Meshwright's engine on the machine of a cluster file."""
    file = measured(cluster)[0]
    estimator = file.estimator(plan)
    if file.serving:
        return engine_times(file.serving, estimator.speeds, estimator.links)
    host = estimator.speeds.host
    each = host.layer(plan.model.base, routed=plan.model.moe is not None, experts=0)[0] if host else 0.0

    def timed(of: Deployment) -> StepTimes:
        rules = of.framework._replace(layer_us=each * 1e6, beside=0 if of.device.is_gpu else BESIDE_ANSWERS)
        return StepTimes(replace(of, framework=rules), MeasuredKernels(estimator.speeds, estimator.links))

    return timed


def engine_times(rates: EngineRates, speeds: Speeds, links: Links) -> Callable[[Deployment], StepTimes]:
    """Steps of Meshwright's engine by its own rates on a machine."""

    def timed(of: Deployment) -> StepTimes:
        sequence_s = rates.sequence_s + rates.logit_s * of.model.shape.vocab
        rules = of.framework._replace(
            layer_us=rates.layer_s * 1e6, step_us=rates.step_s * 1e6, sequence_us=sequence_s * 1e6, fuses=True,
            prompt_layer_us=rates.prompt_layer_s * 1e6, beside=BESIDE_ANSWERS,
        )  # fmt: skip
        return StepTimes(replace(of, framework=rules), EngineKernels(speeds, links, rates, weights_bytes(of)))

    return timed


def _adapter(asked: ServingAsked, number: int, rank: int, targets: str) -> LoRAShape:
    """ArgumentError where it makes no sense."""
    _check_range("adapters", number, MOST_REQUESTS)
    try:
        lora = LoRAShape(rank=rank, targets=targets)
        replace(asked.model.shape.base, lora=lora)
    except PlanError as error:
        raise ArgumentError(str(error).replace("model.lora.", "adapter_")) from None
    return lora


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ArgumentError(f"{name}={value} must be at least 1 and at most {most:,}")


def _does_not_fit(answer: ServingAnswer) -> DoesNotFit:
    """With the nearest layout, and what would fit."""
    one, asked = answer.best, answer.asked
    memory = one.memory
    needed = memory.held_bytes + memory.sequence_bytes
    others = [
        (f"quantization={name}", formats_of(name, experts=asked.model.shape.moe is not None))
        for name in NARROWER if FORMATS[name].width < asked.formats.experts.width
    ]  # fmt: skip
    smaller = smallest_format(asked, others)
    more = Cluster(device=asked.cluster.device, devices_per_node=2 * asked.cluster.devices_per_node)
    hint = smaller or f"cluster={more.device.name} with more than {asked.cluster.devices_per_node} devices in a node"
    error = DoesNotFit(
        f"{asked.model.shape.name} with one sequence of {asked.length:,} tokens needs {gib(needed)} per GPU with "
        f"{one.words}, and {gib(memory.usable_bytes)} are usable: take {hint}"
    )
    error.document = {
        "kind": "serving plan", "fits": False, "model": asked.model.shape.name,
        "does_not_fit": [row_of(one) for one in answer.layouts],
    }  # fmt: skip
    return error
