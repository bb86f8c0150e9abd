"""Reasons why a CUDA graph cannot capture a pass (layout.cuda_graphs).

Obstacles that depend on the device are checked once it is known (parallel/graphs/pass_graphs.py).
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec.layout.layout import RECOMPUTE, Layout, Recompute
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.compiled_blocks import can_be_compiled

OFF = "layout.cuda_graphs=off"
CAPTURED: dict[str, tuple[object, ...]] = {
    "pp": (1,), "tp": (1,), "cp": (1,), "ep": (1,), "zero": (0,), "offload": ("off",),
}  # fmt: skip
"""Values that a layout with graphs may have. Passes of any other layout communicate, or move memory off the device."""
ATTENDS_AGAIN = ("selective", "full")
"""Policies that recompute the attention core. In compiled code this resets its random state, even without dropout:
torch's compiler treats every call of that operator as random."""


def capturing_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why layout.cuda_graphs=on is impossible, each with the change to make."""
    if layout.cuda_graphs == "on":
        for graph_does, take in hindrances(shape, recipe, layout):
            yield f"layout.cuda_graphs=on {graph_does}: take {take}"


def hindrances(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield (what a graph does and the setting that clashes with it, the setting to use instead).

    A captured pass has no collective, no copy to the host and no decision by the host. It adds gradients up in one
    buffer.
    """
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
    """Yield why layout.cuda_graphs=auto is off, as things that every graph, or some device, does."""
    if not can_be_compiled(shape, recipe.fake_quantize):
        yield "repeats launches, and matrices are made anew in each pass"
    if shape.moe is not None:
        yield "repeats launches, and some devices read on the host how many rows each expert has"
    for graph_does, _ in hindrances(shape, recipe, layout):
        yield graph_does


def policies(layout: Layout) -> tuple[Recompute, ...]:
    """Return the recompute policies under which passes of this layout can be captured, without dropout."""
    acting = {word: replace(layout, recompute=word, offload="off").acting_recompute for word in RECOMPUTE}
    return tuple(word for word, acts in acting.items() if acts not in ATTENDS_AGAIN or layout.compile == "off")


def _random_state(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    dropout = {"recipe.dropout": recipe.dropout, "model.lora.dropout": shape.lora.dropout if shape.lora else 0.0}
    for key, rate in dropout.items():
        if rate and layout.acting_recompute != "none":
            yield (
                f"cannot reset a random state, as layout.recompute={layout.recompute} does for {key}={rate}",
                f"layout.recompute=none or {OFF}",
            )
            return
    hides = recipe.document_mask or any(shape.window_of(layer) for layer in range(shape.layers))
    if recipe.dropout and recipe.precision == "fp32" and hides:
        yield (
            "cannot reset a random state, as fp32 attention over documents or windows does for "
            f"recipe.dropout={recipe.dropout}",
            f"recipe.dropout=0, recipe.precision=bf16 or {OFF}",
        )
    if layout.recompute not in policies(layout):
        yield (
            "cannot reset a random state, as compiled code does that recomputes attention "
            f"(layout.recompute={layout.recompute})",
            f"layout.recompute=none, layout.compile=off or {OFF}",
        )
