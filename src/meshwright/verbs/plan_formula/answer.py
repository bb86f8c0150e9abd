"""`plan --formula`: memory by the formulas of papers, next to what this engine keeps. Needs no torch, no GPU."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.planning.layouts import carried_layout, fixed_layout
from meshwright.interface.planning.plan_reading import Section, section_words
from meshwright.interface.planning.plan_request import requested_plan
from meshwright.planner.cost.block import LayerWork, layer
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.memory.on_paper import ComponentRow, KeptRow, component_rows, kept_rows, state_rows
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.memory.held import WIDTHS

DEVICE = "h100x1"
"""Cluster of a request that names none."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FormulaAnswer(Answer):
    """Activations of a layer, parameters and states of a model: on paper, and in this engine on one device."""

    plan: Plan
    layer: tuple[KeptRow, ...]
    """Operations of the most frequent kind of layer, for one micro-batch, without recomputation."""
    policies: dict[str, tuple[int, int]]
    """Recompute policy -> bytes of all layers on paper (0 = not in the paper) and in this engine."""
    components: tuple[ComponentRow, ...]
    states: dict[str, dict[str, int]]
    """Precision -> bytes of weights, gradients, masters and moments."""

    @property
    def layer_bytes(self) -> tuple[int, int]:
        """Bytes that a layer keeps: on paper, in this engine."""
        return sum(row.paper_bytes for row in self.layer), sum(row.engine_bytes for row in self.layer)

    @property
    def parameters(self) -> int:
        """N."""
        return sum(row.count for row in self.components)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright plan MODEL --formula --json` prints."""
        shape, recipe, layout = self.plan.model, self.plan.recipe, self.plan.layout
        return {
            "model": shape.name, "precision": recipe.precision, "kernels": layout.kernels,
            "symbols": {"a": shape.heads, "b": layout.micro_batch, "h": shape.hidden, "L": shape.layers,
                        "s": recipe.sequence, "v": shape.vocab},
            "layer": self.rows(),
            "layer_bytes": dict(zip(("paper", "engine"), self.layer_bytes, strict=True)),
            "policies": {name: {"paper": paper, "engine": engine} for name, (paper, engine) in self.policies.items()},
            "parameters": self.parameters,
            "components": [asdict(row) for row in self.components],
            "states": self.states,
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each operation of a layer."""
        return [asdict(row) for row in self.layer]

    def __repr__(self) -> str:
        paper, engine = self.layer_bytes
        return f"{self.plan.model.name}: a layer keeps {paper:,} bytes on paper, {engine:,} in this engine"

    def _repr_html_(self) -> str:
        cells = [
            (row.part, row.operation, row.formula, f"{row.paper_bytes:,}", f"{row.engine_bytes:,}", row.why)
            for row in self.layer
        ]
        return whole(line(repr(self)), table(("part", "operation", "formula", "paper", "this engine", "why"), cells))


@checked
def plan_formula(
    model: str | Path | Plan | HasPlan, *, cluster: str | None = None, layout: Section = None, recipe: Section = None
) -> FormulaAnswer:
    """Count the memory of a model by the formulas of papers, row by row, next to what this engine keeps.

    Args:
        model: A preset, a Hugging Face folder, a plan file or a plan.
        cluster: Device, as "h100x1". Kernels differ between a CPU and a GPU.
        layout: `micro_batch`, `kernels` and `compile`, as "micro_batch=1,kernels=reference".
        recipe: Changes of the recipe, as {"sequence": 2048, "dropout": 0.1}.

    Raises:
        PlanError: An argument makes no sense.
    """
    asked, words = carried_layout(
        requested_plan(model, cluster or DEVICE, 1, section_words(recipe)), section_words(layout)
    )
    if unread := next((word for word in words if word.partition("=")[0] != "micro_batch"), ""):
        raise ArgumentError(
            "layout",
            rule=f"has {unread}, and the formulas are of one device: they read micro_batch, kernels and compile",
            remedy=f"leave {unread} out, or plan a layout without {argument('formula', True)}",
        )
    fixed = {key: values[0] for key, values in fixed_layout(asked, words).items()}
    shape, recipe_asked = asked.model, asked.recipe
    plan = replace(asked, layout=replace(asked.layout, micro_batch=fixed.get("micro_batch", 1)))
    local = local_shape(
        shape, MESHWRIGHT, plan.layout, recipe_asked.sequence, plan.layout.micro_batch,
        WIDTHS[recipe_asked.precision].parameter, dropout=recipe_asked.dropout,
        documents=recipe_asked.document_mask, gpu=plan.cluster.device.is_gpu, products=recipe_asked.products,
    )  # fmt: skip
    kinds = Counter((shape.is_moe_layer(index), bool(shape.linear_of(index))) for index in range(shape.layers))
    blocks = {kind: layer(local, routed=kind[0], state=kind[1]) for kind in kinds}
    usual = blocks[kinds.most_common(1)[0][0]]
    rows, components = tuple(kept_rows(local, usual)), tuple(component_rows(shape))
    return FormulaAnswer(
        plan=plan, layer=rows, policies=_policies(plan, kinds, blocks), components=components,
        states=state_rows(sum(row.count for row in components)),
    )  # fmt: skip


def _policies(
    plan: Plan, kinds: Counter[tuple[bool, bool]], blocks: dict[tuple[bool, bool], LayerWork]
) -> dict[str, tuple[int, int]]:
    shape, s, b = plan.model, plan.recipe.sequence, plan.layout.micro_batch
    linear, scores = s * b * shape.hidden * shape.layers, shape.heads * s**2 * b * shape.layers
    paper = {"none": 34 * linear + 5 * scores, "selective": 34 * linear, "full": 2 * linear}
    engine: Counter[str] = Counter()
    for kind, count in kinds.items():
        for policy, sizes in blocks[kind].by_policy().items():
            engine[policy] += round(count * sizes.kept_bytes)
    return {policy: (paper.get(policy, 0), size) for policy, size in engine.items()}
