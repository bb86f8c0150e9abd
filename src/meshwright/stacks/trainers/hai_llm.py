"""HAI-LLM, with which DeepSeek-V3 was trained. It is not public: plans are made for it, and no file is written."""

from dataclasses import replace

from meshwright.planner.accuracy.published_stacks import HAI_LLM as AS_PUBLISHED
from meshwright.planner.cost.stack import Stack
from meshwright.spec.errors import ArgumentError, PlanError, argument
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import Facts
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware


def _stack(facts: Facts) -> Stack:
    return replace(AS_PUBLISHED, product_bytes=1.0)


def _facts(plan: Plan) -> Facts:
    if plan.model.moe is None or plan.model.mla is None:
        raise PlanError(
            f"hai-llm is counted with DeepSeek-V3's blocks, and {plan.model.name} lacks latent attention with experts: "
            f"take {argument('model', 'deepseek-v3')}, or another {argument('stack')}"
        )
    return {}


def with_second_head(shape: ModelShape) -> ModelShape:
    """Return the shape with the block that predicts one more token (report, sections 2.2 and 4.2)."""
    return shape if shape.unbuilt else replace(shape, unbuilt=UnbuiltParts(predicts=1))


def _launch(plan: Plan) -> LaunchCommand:
    raise ArgumentError("out", rule="needs software with files, and hai-llm is not public", remedy="leave it out")


HAI_LLM = TrainingSoftware(
    word="hai-llm",
    title="HAI-LLM, as the DeepSeek-V3 report describes it (arXiv:2412.19437)",
    stack=_stack,
    offered={
        "tp": (1,), "cp": (1,), "zero": (1,), "dp_replicate": (1,), "schedule": ("dualpipe-v",), "vp": (2,),
        "recompute": ("none",), "recompute_layers": (0,), "offload": ("off",), "cuda_graphs": ("auto", "off"),
    },
    reasons={
        "tp": "section 3.2: no tensor parallelism", "cp": "no run with it was published",
        "zero": "section 3.2: ZeRO-1 data parallelism", "dp_replicate": "its ZeRO-1 shares states over all replicas",
        "schedule": "section 3.2.1: DualPipe, counted as its V on as many ranks", "vp": "DualPipe: two stages a rank",
        "recompute": "sections 3.2.3 and 3.3.3: it always makes norms, up-projections and SwiGLU again",
    },
    files=(),
    facts=_facts,
    trained_shape=with_second_head,
    launch=_launch,
    measured=("DeepSeek-V3 report",),
    unknown=(
        "That row is one run, and its report says neither how layers are dealt to ranks nor the micro-batch (1 here).",
        "Its memory was not published: it is counted from what the report keeps, and in which format.",
        "The report does not mention outputs of experts: they are taken as not kept. With them its run would not fit.",
    ),
    axes={},
)  # fmt: skip
