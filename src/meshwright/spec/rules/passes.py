"""Rules for how passes run: compiled, captured as CUDA graphs, with weights held as codes or rounded in products.

Compiled blocks are layout.compile, graphs layout.cuda_graphs. Obstacles to graphs that depend on the device are checked
once it is known (parallel/pipeline/pass_graphs.py).

Frozen matrices may be codes (model.lora.base). They are restored for each product, cut like numbers by tensor and
expert parallelism, and sharded by ZeRO-3 (spec/weights/boxes.py). Trained ones may be rounded in each product
(recipe.fake_quantize). Each refusal names the nearest legal change.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.spec.errors import printable
from meshwright.spec.layout.layout import RECOMPUTE, Layout, Recompute
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import SAME_BASE, ModelShape
from meshwright.spec.recipe.recipe import NO_SCHEME, Recipe
from meshwright.spec.weights.boxes import rounded_matrices, shared_scales

GRAPHS_OFF = "layout.cuda_graphs=off"
CAPTURED: dict[str, tuple[object, ...]] = {
    "pp": (1,), "tp": (1,), "cp": (1,), "ep": (1,), "zero": (0,), "offload": ("off",),
}  # fmt: skip
"""Values that a layout with graphs may have. Passes of any other layout communicate, or move memory off the device."""
ATTENDS_AGAIN = ("selective", "full")
"""Policies that recompute the attention core. In compiled code this resets its random state, even without dropout:
torch's compiler treats every call of that operator as random."""


def holds_codes(shape: ModelShape) -> bool:
    """Return whether frozen matrices are codes and scales."""
    return shape.lora is not None and shape.lora.base != SAME_BASE


def draws_dropout(shape: ModelShape, recipe: Recipe) -> bool:
    """Return whether a training step drops elements, in the model or in adapters."""
    return recipe.dropout > 0 or (shape.lora is not None and shape.lora.dropout > 0)


def shares_codes(layout: Layout) -> bool:
    """Return whether data-parallel ranks shard the codes.

    Only ZeRO-3 without a pipeline does, which gathers weights for each pass and frees them afterwards. If weights stay
    whole within a step (ZeRO 1 and 2, a pipeline), a shard would only be stored in addition.
    """
    return layout.gathers_each_pass


def frozen_code_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why this layout or recipe cannot hold frozen matrices as codes."""
    if shape.lora is None or not holds_codes(shape):
        return
    base = f"model.lora.base={shape.lora.base}"
    if layout.tp > 1 and shape.lora.scheme is not None and shape.lora.scheme.activations != "same":
        yield (
            f"{base} rounds each row of activations as a whole, and layout.tp={layout.tp} cuts rows: take layout.tp=1, "
            "or model.lora.base=nf4-double"
        )
    if layout.compile == "on":
        yield f"{base} restores matrices in parts, which layout.compile=on does not compile: take layout.compile=off"
    if layout.cuda_graphs == "on":
        yield f"{base} restores matrices in each pass, and layout.cuda_graphs=on would keep room for all: leave it out"
    if recipe.products != "same":
        yield (
            f"recipe.products={recipe.products} rounds matrices to 8 bits, and {base} has fewer already: take "
            "recipe.products=same"
        )


def learnable() -> tuple[str, ...]:
    """Return the schemes that a model can be trained for: whole numbers or nf4, without calibration text.

    Schemes with outlier columns in 16 bits are excluded, because the columns would change as weights move. So are those
    with one scale for a matrix: ranks with parts of it exchange the extremes of its rows.
    """
    return tuple(
        name
        for name, scheme in SCHEMES.items()
        if not scheme.calibrated and scheme.outliers == "none" and scheme.codes != "e4m3"
        and (scheme.activations == "same" or scheme.vector_wise)
    )  # fmt: skip


def fake_quantization_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why a plan cannot round weights in its products.

    A matrix is rounded anew in each product, exactly as it will be when written, whichever ranks hold its parts.
    """
    if recipe.fake_quantize == NO_SCHEME:
        return
    setting, off = f"recipe.fake_quantize={printable(recipe.fake_quantize)}", f"recipe.fake_quantize={NO_SCHEME}"
    if recipe.fake_quantize not in learnable():
        yield f"{setting} is no scheme that weights are trained for: take one of {', '.join(learnable())}, or {off}"
        return
    yield from _cut_groups(shape, recipe.fake_quantize, layout, setting)
    if shape.lora is not None:
        # Offer codes under the adapters, if the scheme can hold them.
        beside = SCHEMES[recipe.fake_quantize].trains_beside
        held = f"model.lora.base={recipe.fake_quantize}, which holds them as codes under the adapters, or "
        yield f"{setting} trains the matrices that are rounded, and model.lora freezes them: take {held * beside}{off}"
    if recipe.products != "same":
        yield f"{setting} and recipe.products={recipe.products} both round weights: take recipe.products=same, or {off}"
    if layout.compile == "on":
        yield f"{setting} rounds matrices in each product, which is not compiled: take layout.compile=off, or {off}"
    if layout.cuda_graphs == "on":
        yield f"{setting} makes new weights in each pass: take layout.cuda_graphs=off, or {off}"


def _cut_groups(shape: ModelShape, name: str, layout: Layout, setting: str) -> Iterator[str]:
    """Yield a refusal when real zeros need all numbers of a group and a rank has only a part of it."""
    scheme = SCHEMES[name]
    if scheme.zeros != "real" or layout.tp == 1:
        return
    for matrix in rounded_matrices(shape):
        if shared_scales(matrix, shape, scheme, layout.tp, layout.ep).within_groups:
            inputs = matrix.shape[-1]
            yield (
                f"{setting} finds zeros of {scheme.group} inputs together, and layout.tp={layout.tp} cuts the {inputs} "
                f"inputs of {matrix.name} within these: take recipe.fake_quantize=int4-rtn, or layout.tp=1"
            )
            return


def can_be_compiled(shape: ModelShape, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether blocks can be compiled: without codes to restore or weights to round in each product."""
    return not holds_codes(shape) and fake_quantize == NO_SCHEME


def leaves_compiler_out(recipe: Recipe) -> bool:
    """Return whether a deterministic recipe runs fastest on a GPU without compiled blocks.

    The compiler then tries no alternative kernels and loses its gain. fp8 products are the exception: uncompiled, each
    rounds its operands in several passes.
    """
    return recipe.deterministic and recipe.products == "same"


def compiles_blocks(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether a layout compiles blocks of this shape on a kind of device (cpu, cuda) that has the tools."""
    return layout.compiles(device) and can_be_compiled(shape, fake_quantize)


def blocks_exclude_experts(layout: Layout) -> bool:
    """Return whether compiled blocks exclude their experts.

    This is so when the number of rows sent to other ranks varies by step, or when reference kernels need lengths on the
    host.
    """
    return layout.ep > 1 or layout.kernels == "reference"


def keeps_no_norms(layout: Layout, shape: ModelShape, device: str, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether blocks without recomputation still store no result of a norm.

    With experts apart, the compiler sees only the parts around them, and the results at their borders are stored.
    """
    apart = shape.moe is not None and blocks_exclude_experts(layout)
    return compiles_blocks(layout, shape, device, fake_quantize) and not apart


def is_lowered(layout: Layout, shape: ModelShape, fake_quantize: str = NO_SCHEME) -> bool:
    """Return whether plan and dry run count the compiled blocks of a GPU as the compiler lowers them.

    Blocks of several ranks and captured passes are counted as uncompiled blocks that recompute norms.
    """
    return (
        layout.keeps_passes_local
        and layout.cuda_graphs != "on"
        and keeps_no_norms(layout, shape, "cuda", fake_quantize)
    )


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
                f"layout.{key}={legal} or {GRAPHS_OFF}",
            )
    yield from _random_state(shape, recipe, layout)
    if recipe.noise_scale_every:
        yield (
            f"adds gradients up in one place, and recipe.noise_scale_every={recipe.noise_scale_every} keeps each "
            "micro-batch's apart",
            f"recipe.noise_scale_every=0 or {GRAPHS_OFF}",
        )
    if recipe.traits.pairs:
        yield (
            f"captures cross-entropy, and recipe.objective={recipe.objective} reads on the host which answers a batch "
            "has",
            GRAPHS_OFF,
        )
    if recipe.traits.teacher:
        yield f"captures one model, and recipe.objective={recipe.objective} has two", GRAPHS_OFF


def explain_auto_off(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield why layout.cuda_graphs=auto is off, as things that every graph, or some device, does."""
    # `on` is refused for these by the rules of quantized weights, and by the check of the device.
    if not can_be_compiled(shape, recipe.fake_quantize):
        yield "repeats launches, and matrices are made anew in each pass"
    if shape.moe is not None:
        yield "repeats launches, and some devices read on the host how many rows each expert has"
    for graph_does, _ in hindrances(shape, recipe, layout):
        yield graph_does


def policies(layout: Layout) -> tuple[Recompute, ...]:
    """Return the recompute policies under which passes of this layout can be captured."""
    # graphs refuse offload by a rule of their own, so it plays no part here
    acting = {word: replace(layout, recompute=word, offload="off").acting_recompute for word in RECOMPUTE}
    return tuple(word for word, acts in acting.items() if acts not in ATTENDS_AGAIN or layout.compile == "off")


def _random_state(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    if recipe.dropout and recipe.document_mask:
        yield (
            "cannot read on the host where documents begin, as attention does with "
            f"recipe.dropout={recipe.dropout} and recipe.document_mask=true",
            f"recipe.dropout=0, recipe.document_mask=false or {GRAPHS_OFF}",
        )
    if layout.recompute not in policies(layout):
        yield (
            "cannot reset a random state, as compiled code does that recomputes attention "
            f"(layout.recompute={layout.recompute})",
            f"layout.recompute=none, layout.compile=off or {GRAPHS_OFF}",
        )
