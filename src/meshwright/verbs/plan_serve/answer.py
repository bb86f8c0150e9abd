"""`plan --serve`: memory, concurrency and speed of a served model, by tensor parallelism. Needs no torch, no GPU."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.planning.plan_request import requested_plan
from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.machine.clusterfile import load_named
from meshwright.planner.serving.cached_layers import elements_per_position, served
from meshwright.planner.serving.closed_loop import Load
from meshwright.planner.serving.deployment import (
    FORMATS,
    FRAMEWORKS,
    MESHWRIGHT,
    VLLM,
    Deployment,
    Framework,
    formats_of,
    meshwright_on,
)
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.planner.serving.measured_kernels import EngineKernels, MeasuredKernels
from meshwright.planner.serving.serving_memory import weights_bytes
from meshwright.planner.serving.serving_plan import (
    CurvePoint,
    ServingLayout,
    ServingRequest,
    Timed,
    curve,
    layouts,
    smallest_format,
)
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec import Cluster, Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit, argument
from meshwright.spec.layout.cluster import names_file
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.plan.execution import BESIDE_ANSWERS
from meshwright.spec.units import gib
from meshwright.spec.weights.inventory import num_parameters

if TYPE_CHECKING:
    from meshwright.model import Transformer
    from meshwright.observe.compare.served_load import ServingColumns

CACHE_WIDTHS: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Dtype of keys and values -> bytes per number."""
NARROWER = ("fp8", "int4_wo")
"""Formats to suggest when weights are too large."""
MOST_TOKENS, MOST_REQUESTS = 10**7, 10**6


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingAnswer(Answer):
    """The layouts of a served model, most tokens per second first."""

    layouts: tuple[ServingLayout, ...]
    timed: Timed
    quantization: str
    kv_dtype: str

    @property
    def asked(self) -> ServingRequest:
        """Model, cluster and load."""
        return self.layouts[0].request

    @property
    def best(self) -> ServingLayout:
        """The recommended layout: most tokens per second of those that hold all requests."""
        return self.layouts[0]

    @property
    def fitting(self) -> tuple[ServingLayout, ...]:
        """The layouts that hold at least one sequence."""
        return tuple(layout for layout in self.layouts if layout.fits)

    @cached_property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Throughput against latency of the recommended layout, over requests in flight."""
        return tuple(curve(self.best, self.timed))

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return num_parameters(self.asked.model.shape)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of all GPUs of one engine, for weights and the cache of its requests, per parameter."""
        best = self.best
        # More requests than fit wait in the queue and take no memory.
        sequences = min(self.asked.concurrency / best.engines, best.memory.most_sequences * best.degrees.attention_dp)
        ranks = best.degrees.tp
        held = best.memory.weights_bytes * best.degrees.gpus + sequences * ranks * best.memory.sequence_bytes
        return held / self.parameters

    def measure(self, waves: int = 4, model: "Transformer | None" = None) -> "ServingColumns":
        """Run the load on this machine with Meshwright's engine in fp32, and return planned, dry run and measured.

        `waves`: requests per slot in flight. `model`: None = random weights. Raises ArgumentError if another machine or
        engine was planned.
        """
        from meshwright.observe.compare.served_load import columns

        deployment = self.best.deployment
        if deployment.framework.name != MESHWRIGHT.name or deployment.device.is_gpu or self.quantization != "fp32":
            raise ArgumentError(
                "cluster",
                sentence=(
                    "measure runs Meshwright's engine on this machine in fp32: plan with "
                    f"{argument('cluster', 'FILE.toml')} of calibrate"
                ),
            )
        load = Load(
            input_tokens=self.asked.input_tokens, output_tokens=self.asked.output_tokens,
            concurrency=self.asked.concurrency, waves=waves,
        )  # fmt: skip
        return columns(self.timed(deployment), load, model)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright plan --serve --json` prints."""
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
            "alternatives": [row_of(layout) for layout in self.fitting[1:]],
            "does_not_fit": [row_of(layout) for layout in self.layouts if not layout.fits],
            "curve": [asdict(point) for point in self.curve],
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each layout, the recommended one first."""
        return [row_of(layout) for layout in self.layouts]

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
            (layout.words, f"{layout.served.first_token_s * 1e3:.0f} ms", f"{layout.served.per_token_s * 1e3:.1f} ms",
             f"{layout.tokens_per_s_per_gpu:,.0f}", gib(layout.memory.weights_bytes), f"{layout.most_requests:,.0f}")
            for layout in self.fitting if layout.served
        ]  # fmt: skip
        heads = ("layout", "first token", "per token", "tokens/s per GPU", "weights", "requests at most")
        return whole(line(repr(self)), table(heads, cells))


def row_of(layout: ServingLayout) -> dict[str, Any]:
    """Return the figures of a layout in plain units."""
    served_load, memory = layout.served, layout.memory
    return {
        "layout": layout.words, **asdict(layout.degrees), "engines": layout.engines, "fits": layout.fits,
        "first_token_seconds": served_load.first_token_s if served_load else None,
        "per_token_seconds": served_load.per_token_s if served_load else None,
        "tokens_per_second": layout.tokens_per_s if served_load else None,
        "tokens_per_second_per_gpu": layout.tokens_per_s_per_gpu if served_load else None,
        "weights_bytes": round(memory.weights_bytes), "adapters_bytes": round(memory.adapters_bytes),
        "activations_bytes": round(memory.activations_bytes), "copies_bytes": round(memory.copies_bytes),
        "graphs_bytes": round(memory.graphs_bytes), "waits": layout.waits,
        "cache_bytes": _finite(memory.cache_bytes), "cache_bytes_per_token": round(memory.position_bytes),
        "cache_bytes_per_sequence": round(memory.sequence_bytes), "most_requests": _finite(layout.most_requests),
    }  # fmt: skip


def _finite(number: float) -> int | None:
    return None if number == float("inf") else round(number)


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
    """Plan memory, concurrency and speed of a served model, for layouts by tensor parallelism.

    Args:
        model: As for `plan`.
        cluster: As for `plan`.
        nodes: As for `plan`.
        input_length: Tokens of a prompt.
        output_length: Tokens of an answer.
        concurrency: Requests in flight on the whole cluster.
        quantization: Weights as bf16, fp8, nvfp4, int4_wo or a scheme of `quantize`. Empty = bf16, or fp32 on a
            measured machine.
        kv_dtype: Dtype of keys and values. Empty = as for `quantization`.
        framework: vllm, sglang, trtllm or meshwright.
        tp: Tensor-parallel degree. 0 = all that divide model and node.
        adapters: LoRA adapters in memory in addition to the model. Their time is not planned.
        adapter_rank: Rank of each adapter.
        adapter_targets: Adapted matrices, as model.lora.targets.

    Raises:
        DoesNotFit: No layout holds one sequence.
        PlanError: An argument makes no sense.
    """
    plan = requested_plan(model, cluster, nodes, ())
    # A measured machine is planned for our own engine, which `measure` runs in fp32.
    machine_file = cluster if cluster is not None and names_file(cluster) else None
    default_format = "fp32" if machine_file else "bf16"
    quantization, kv_dtype = quantization or default_format, kv_dtype or default_format
    asked, timed = asked_load(
        plan, machine_file, input_length=input_length, output_length=output_length, concurrency=concurrency,
        quantization=quantization, kv_dtype=kv_dtype, framework=framework,
    )  # fmt: skip
    if adapters:
        lora = _adapter(asked, adapters, adapter_rank, adapter_targets)
        asked = replace(asked, adapters=adapters, adapter=lora)
    planned = layouts(asked, timed, tp)
    if not planned:
        raise ArgumentError(
            "tp",
            tp,
            f"does not divide both {plan.model.name} and a node of {plan.cluster.devices_per_node} devices",
            "leave it out to see what does",
        )
    answer = ServingAnswer(layouts=tuple(planned), timed=timed, quantization=quantization, kv_dtype=kv_dtype)
    if not answer.fitting:
        raise _does_not_fit(answer)
    # Prefer a layout that holds all requests at once to faster ones that let some wait.
    # Layouts are ordered by speed, so the first that holds all requests is the fastest of these.
    holding = [layout for layout in planned if layout.fits and not layout.waits]
    if holding and holding[0] is not planned[0]:
        planned.remove(holding[0])
        answer = replace(answer, layouts=(holding[0], *planned))
    return answer


def asked_load(
    plan: Plan,
    machine_file: str | None,
    *,
    input_length: int,
    output_length: int,
    concurrency: int,
    quantization: str,
    kv_dtype: str,
    framework: str,
) -> tuple[ServingRequest, Timed]:
    """Return the requested load for the model and cluster of a plan, and the times of its steps.

    `machine_file`: the file of a measured machine. Raises ArgumentError.
    """
    _check_range("input_length", input_length, MOST_TOKENS)
    _check_range("output_length", output_length, MOST_TOKENS)
    _check_range("concurrency", concurrency, MOST_REQUESTS)
    if kv_dtype not in CACHE_WIDTHS:
        raise ArgumentError("kv_dtype", kv_dtype, "is not known", f"take one of {', '.join(CACHE_WIDTHS)}")
    rules, timed = _framework_rules(framework, plan, machine_file)
    asked = ServingRequest(
        model=served(plan.model.base), cluster=plan.cluster, framework=rules,
        formats=formats_of(quantization, experts=plan.model.moe is not None), cache_width=CACHE_WIDTHS[kv_dtype],
        input_tokens=input_length, output_tokens=output_length, concurrency=concurrency,
    )  # fmt: skip
    if asked.length > plan.model.max_positions:
        raise ArgumentError(
            "input_length",
            input_length,
            (
                f"+ {argument('output_length', output_length)} exceed the {plan.model.max_positions:,} "
                f"positions of {plan.model.name}"
            ),
            "shorten one",
        )
    return asked, timed


def _framework_rules(name: str, plan: Plan, cluster: str | None) -> tuple[Framework, Timed]:
    """Return the rules of a framework and its step times, measured ones if `cluster` is a file."""
    engine = meshwright_on(plan.cluster.device, plan.model.hidden)
    frameworks = {**FRAMEWORKS, engine.name: engine}
    if name and name not in frameworks:
        raise ArgumentError("framework", name, "is not known", f"take one of {', '.join(frameworks)}")
    if cluster is None:
        return frameworks[name or VLLM.name], StepTimes
    if name not in ("", MESHWRIGHT.name):
        raise ArgumentError(
            "framework",
            name,
            remedy=f"a measured machine runs Meshwright's own engine: {argument('framework', 'meshwright')}",
        )
    return engine, measured_times(cluster, plan)


def measured_times(cluster: str, plan: Plan) -> Callable[[Deployment], StepTimes]:
    """Return step times of Meshwright's engine on the machine of a cluster file."""
    file = load_named(cluster)[0]
    estimator = file.estimator(plan)
    if file.serving:
        return engine_times(file.serving, estimator.speeds, estimator.links)
    host = estimator.speeds.host
    # Without rates of the serving engine, launches cost what they do in training.
    layer_s = host.layer(plan.model.base, routed=plan.model.moe is not None, experts=0)[0] if host else 0.0

    def timed(deployment: Deployment) -> StepTimes:
        rules = deployment.framework._replace(
            layer_us=layer_s * 1e6, mixed_prompt_tokens=0 if deployment.device.is_gpu else BESIDE_ANSWERS
        )
        return StepTimes(replace(deployment, framework=rules), MeasuredKernels(estimator.speeds, estimator.links))

    return timed


def engine_times(rates: EngineRates, speeds: Speeds, links: Links) -> Callable[[Deployment], StepTimes]:
    """Return step times of Meshwright's engine by its measured rates on a machine."""

    def timed(deployment: Deployment) -> StepTimes:
        # Sampling reads all logits of a sequence, so its time grows with the vocabulary.
        sequence_s = rates.sequence_s + rates.logit_s * deployment.model.shape.vocab
        rules = deployment.framework._replace(
            layer_us=rates.layer_s * 1e6, step_us=rates.step_s * 1e6, sequence_us=sequence_s * 1e6, fuses=True,
            prompt_layer_us=rates.prompt_layer_s * 1e6, mixed_prompt_tokens=BESIDE_ANSWERS,
        )  # fmt: skip
        return StepTimes(
            replace(deployment, framework=rules), EngineKernels(speeds, links, rates, weights_bytes(deployment))
        )

    return timed


def _adapter(asked: ServingRequest, number: int, rank: int, targets: str) -> LoRAShape:
    _check_range("adapters", number, MOST_REQUESTS)
    try:
        lora = LoRAShape(rank=rank, targets=targets)
        replace(asked.model.shape.base, lora=lora)
    except ArgumentError as error:
        # The shape names keys of a plan, and the caller knows arguments of this function.
        name = error.argument.replace("model.lora.", "adapter_")
        raise ArgumentError(name, error.value, error.rule, error.remedy) from None
    return lora


def _check_range(name: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise ArgumentError(name, number, f"must be at least 1 and at most {most:,}")


def _does_not_fit(answer: ServingAnswer) -> DoesNotFit:
    """Return the error, with the nearest layout and what would fit."""
    best, load = answer.best, answer.asked
    memory = best.memory
    needed = memory.held_bytes + memory.sequence_bytes
    others = [
        (argument("quantization", name), formats_of(name, experts=load.model.shape.moe is not None))
        for name in NARROWER if FORMATS[name].width < load.formats.experts.width
    ]  # fmt: skip
    smaller = smallest_format(load, others)
    # Tensor parallelism stays within a node, so more nodes would not help: name a larger node.
    more = Cluster(device=load.cluster.device, devices_per_node=2 * load.cluster.devices_per_node)
    hint = (
        smaller
        or f"{argument('cluster', more.device.name)} with more than {load.cluster.devices_per_node} devices in a node"
    )
    error = DoesNotFit(
        f"{load.model.shape.name} with one sequence of {load.length:,} tokens needs {gib(needed)} per GPU with "
        f"{best.words}, and {gib(memory.usable_bytes)} are usable: take {hint}"
    )
    error.document = {
        "kind": "serving plan", "fits": False, "model": load.model.shape.name,
        "does_not_fit": [row_of(best) for best in answer.layouts],
    }  # fmt: skip
    return error
