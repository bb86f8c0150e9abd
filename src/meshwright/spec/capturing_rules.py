"""What a CUDA graph of a pass cannot hold (layout.cuda_graphs), each refusal a sentence. What only the device decides
is refused when it is known (parallel/pass_graphs.py)."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec.layout import RECOMPUTE, Layout, Recompute
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape

STAYS = "layout.cuda_graphs=on captures a pass that stays on its device"
OFF = "layout.cuda_graphs=off"
CAPTURED: dict[str, tuple[object, ...]] = {
    "pp": (1,), "tp": (1,), "cp": (1,), "ep": (1,), "zero": (0,), "offload": ("off",),
}  # fmt: skip
"""What a layout with graphs may have; a pass of any other sends, or moves memory off its device."""
ATTENDS_AGAIN = ("selective", "full")
"""Policies that make the attention core again, where they act. In compiled code its random state would be set back,
dropout or not: torch's compiler takes every call of that operator for a random one."""


def capturing_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """No collective and no copy to the host inside of a pass, nothing that the host decides in it, and gradients that
    are added up in one place."""
    if layout.cuda_graphs == "off":
        return
    for key, (legal,) in CAPTURED.items():
        if (found := getattr(layout, key)) != legal:
            how = "moves memory off it" if key == "offload" else "sends in it"
            yield f"{STAYS}, and layout.{key}={found} {how}: take layout.{key}={legal} or {OFF}"
    yield from _random_state(shape, recipe, layout)
    if recipe.noise_scale_every:
        yield (
            f"layout.cuda_graphs=on adds gradients up in one place, and recipe.noise_scale_every="
            f"{recipe.noise_scale_every} keeps each micro-batch's apart: take recipe.noise_scale_every=0 or {OFF}"
        )
    if recipe.traits.pairs:
        yield (
            f"layout.cuda_graphs=on captures cross-entropy, and recipe.objective={recipe.objective} reads on the host "
            f"which answers a batch has: take {OFF}"
        )
    if recipe.traits.teacher:
        yield f"layout.cuda_graphs=on captures one model, and recipe.objective={recipe.objective} has two: take {OFF}"


def policies(layout: Layout) -> tuple[Recompute, ...]:
    """Those of its words of recompute whose passes can be captured, without dropout."""
    acting = {word: replace(layout, recompute=word, offload="off").acting_recompute for word in RECOMPUTE}
    return tuple(word for word, acts in acting.items() if acts not in ATTENDS_AGAIN or layout.compile == "off")


def _random_state(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    dropout = {"recipe.dropout": recipe.dropout, "model.lora.dropout": shape.lora.dropout if shape.lora else 0.0}
    for key, rate in dropout.items():
        if rate and layout.acting_recompute != "none":
            yield (
                f"layout.cuda_graphs=on cannot set a random state back, as layout.recompute={layout.recompute} does "
                f"for {key}={rate}: take layout.recompute=none or {OFF}"
            )
            return
    hides = recipe.document_mask or any(shape.window_of(layer) for layer in range(shape.layers))
    if recipe.dropout and recipe.precision == "fp32" and hides:
        yield (
            f"layout.cuda_graphs=on cannot set a random state back, as fp32 attention over documents or windows "
            f"does for recipe.dropout={recipe.dropout}: take recipe.dropout=0, recipe.precision=bf16 or {OFF}"
        )
    if layout.recompute not in policies(layout):
        yield (
            f"layout.cuda_graphs=on cannot set a random state back, as compiled code does that makes attention again "
            f"(layout.recompute={layout.recompute}): take layout.recompute=none, layout.compile=off or {OFF}"
        )
