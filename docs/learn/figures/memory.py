"""Memory of one device by sequence, micro-batch, recomputation and kernels, for three models and two layouts."""

from typing import Any

from docs.pictures.figures import BAR_KINDS, usable
from meshwright.planner.step.predict import predict
from meshwright.spec import Plan, Recipe, presets
from meshwright.spec.layout.layout import Layout

TITLE = "Memory of a GPU: states and activations"
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")
SEQUENCES = (2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4)
POLICIES = ("none", "selective", "all-but-attention", "full")
KERNELS = {"flash attention": "auto", "plain attention": "reference"}
LAYOUTS = {
    "1 GPU": Layout(), "8 GPUs, ZeRO-3": Layout(dp_shard=8, zero=3), "8 GPUs, tp=8": Layout(tp=8, sp=True),
}  # fmt: skip
KINDS = {
    "weights": BAR_KINDS["parameters"], "gradients": BAR_KINDS["gradients"],
    "optimizer": (*BAR_KINDS["masters"], *BAR_KINDS["moments"]), "activations": BAR_KINDS["activations"],
    "logits and temporaries": (*BAR_KINDS["logits"], *BAR_KINDS["temporaries"]),
}  # fmt: skip
GIB = 2**30


def parts(model: str, layout: Layout, sequence: int, batch: int, policy: str, kernels: str) -> list[float]:
    """GiB of each kind at the peak of a step of two micro-batches per rank, whose gradients are summed."""
    layout = Layout(
        dp_shard=layout.dp_shard, zero=layout.zero, tp=layout.tp, sp=layout.sp, micro_batch=batch,
        recompute=policy, kernels=kernels, cuda_graphs="off",  # type: ignore[arg-type]  # words of the tables above
    )  # fmt: skip
    recipe = Recipe(sequence=sequence, global_batch=2 * batch * layout.dp_shard, precision="bf16")
    nodes = max(1, layout.world // 8)
    cluster = presets.cluster(f"h100x{layout.world // nodes}", nodes)
    plan = Plan(model=presets.model(model), recipe=recipe, layout=layout, cluster=cluster)
    sizes = max(predict(plan).memory, key=lambda rank: rank.total_bytes).kinds
    return [round(sum(sizes[name] for name in names) / GIB, 1) for names in KINDS.values()]


def data() -> dict[str, Any]:
    """Model -> layout -> kernels -> sequence -> micro-batch -> a list of parts for each policy."""
    return {
        "kinds": list(KINDS),
        "policies": POLICIES,
        "usable": round(usable(), 1),
        "sequences": SEQUENCES,
        "batches": BATCHES,
        "models": {
            model: {
                name: {
                    shown: {
                        sequence: {
                            batch: [parts(model, layout, sequence, batch, policy, kernels) for policy in POLICIES]
                            for batch in BATCHES
                        }
                        for sequence in SEQUENCES
                    }
                    for shown, kernels in KERNELS.items()
                }
                for name, layout in LAYOUTS.items()
            }
            for model in MODELS
        },
    }
