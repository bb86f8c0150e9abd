"""What a CUDA graph of a pass cannot hold (layout.cuda_graphs), each refusal a sentence. What only the device decides
is refused when it is known (parallel/pass_graphs.py)."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec.compiled_blocks import can_be_compiled
from meshwright.spec.layout import RECOMPUTE, Layout, Recompute
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape

OFF = "layout.cuda_graphs=off"
CAPTURED: dict[str, tuple[object, ...]] = {
    "pp": (1,), "tp": (1,), "cp": (1,), "ep": (1,), "zero": (0,), "offload": ("off",),
}  # fmt: skip
"""What a layout with graphs may have; a pass of any other sends, or moves memory off its device."""
ATTENDS_AGAIN = ("selective", "full")
"""Policies that make the attention core again, where they act. In compiled code its random state would be set back,
dropout or not: torch's compiler takes every call of that operator for a random one."""


def capturing_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Why passes that are to be graphs cannot be, and what to take instead."""
    if layout.cuda_graphs == "on":
        for graph_does, take in hindrances(shape, recipe, layout):
            yield f"layout.cuda_graphs=on {graph_does}: take {take}"


def hindrances(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    """(what a graph does, and what of a plan clashes with it; what to take). No collective and no copy to the host
    inside of a pass, nothing that the host decides in it, and gradients that are added up in one place."""
    for key, (legal,) in CAPTURED.items():
        if (asked := getattr(layout, key)) != legal:
            how = "moves memory off it" if key == "offload" else "sends in it"
            yield (
                f"captures a pass that stays on its device, and layout.{key}={asked} {how}",
                f"layout.{key}={legal} or {OFF}",
            )
    yield from _random_state(shape, recipe, layout)
    if recipe.noise_scale_every:
        yield (
            f"adds gradients up in one place, and recipe.noise_scale_every={recipe.noise_scale_every} keeps each "
            "micro-batch's apart",
            f"recipe.noise_scale_every=0 or {OFF}",
        )
    if recipe.traits.pairs:
        yield (
            f"captures cross-entropy, and recipe.objective={recipe.objective} reads on the host which answers a batch "
            "has",
            OFF,
        )
    if recipe.traits.teacher:
        yield f"captures one model, and recipe.objective={recipe.objective} has two", OFF


def left_to_auto(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Why layout.cuda_graphs=auto is off, each of what a graph does: what none can hold, and what a device that is not
    here may refuse."""
    if not can_be_compiled(shape, recipe.fake_quantize):
        yield "repeats launches, and matrices are made anew in each pass"
    if shape.moe is not None:
        yield "repeats launches, and some devices read on the host how many rows each expert has"
    for graph_does, _ in hindrances(shape, recipe, layout):
        yield graph_does


def policies(layout: Layout) -> tuple[Recompute, ...]:
    """Those of its words of recompute whose passes can be captured, without dropout."""
    acting = {word: replace(layout, recompute=word, offload="off").acting_recompute for word in RECOMPUTE}
    return tuple(word for word, acts in acting.items() if acts not in ATTENDS_AGAIN or layout.compile == "off")


def _random_state(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    dropout = {"recipe.dropout": recipe.dropout, "model.lora.dropout": shape.lora.dropout if shape.lora else 0.0}
    for key, rate in dropout.items():
        if rate and layout.acting_recompute != "none":
            yield (
                f"cannot set a random state back, as layout.recompute={layout.recompute} does for {key}={rate}",
                f"layout.recompute=none or {OFF}",
            )
            return
    hides = recipe.document_mask or any(shape.window_of(layer) for layer in range(shape.layers))
    if recipe.dropout and recipe.precision == "fp32" and hides:
        yield (
            "cannot set a random state back, as fp32 attention over documents or windows does for "
            f"recipe.dropout={recipe.dropout}",
            f"recipe.dropout=0, recipe.precision=bf16 or {OFF}",
        )
    if layout.recompute not in policies(layout):
        yield (
            "cannot set a random state back, as compiled code does that makes attention again "
            f"(layout.recompute={layout.recompute})",
            f"layout.recompute=none, layout.compile=off or {OFF}",
        )
