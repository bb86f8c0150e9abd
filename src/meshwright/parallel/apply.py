"""Application of a layout to a model, in a fixed order (docs/decisions/0004-parallel-engine.md)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from meshwright import compat
from meshwright.kernels.chooser import simulated_kind
from meshwright.kernels.linear.linear import SAME
from meshwright.kernels.quantized.quantize import MatrixPart, quantize_matrix
from meshwright.model import Transformer
from meshwright.model.fake_quantized import FakeQuantized, put_fake_quantization
from meshwright.model.init import fill_initial
from meshwright.model.layers import Linear
from meshwright.model.low_rank import LoRA
from meshwright.model.quantized_weights import frozen_codes
from meshwright.model.seams import BlockCall
from meshwright.model.transformer import materialize, shrink, skeleton
from meshwright.parallel.axes import data
from meshwright.parallel.axes.context import mask_maker, whole_sums
from meshwright.parallel.axes.data import replicate
from meshwright.parallel.axes.expert import apply_expert_parallel, apply_sequence_groups
from meshwright.parallel.axes.ring import context_attend
from meshwright.parallel.axes.sequence import SequenceSlices
from meshwright.parallel.axes.tensor import apply_tensor_parallel
from meshwright.parallel.blocks.compiling import compile_call, is_compiled, prepare, resolve_auto, unrecomputed_policy
from meshwright.parallel.blocks.offload import Offload
from meshwright.parallel.blocks.recompute import block_call, choose_call, keep_attention, recompute_attention
from meshwright.parallel.engine import Engine
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import Mesh, make_group, make_mesh
from meshwright.parallel.pipeline.pass_graphs import pass_graphs
from meshwright.parallel.pipeline.passes import cut, make_pipeline, share_embedding
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import Layout, own_stages
from meshwright.spec.memory.held import adds_gradients, list_common
from meshwright.spec.memory.held import list_held as held_by
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import NO_SCHEME
from meshwright.spec.rules.legal import shares_tied_ends
from meshwright.spec.rules.passes import blocks_exclude_experts, can_be_compiled
from meshwright.spec.weights.boxes import Box, CodesCut, boxes, shared_scales
from meshwright.spec.weights.inventory import parameters


def build_engine(
    shape: ModelShape,
    layout: Layout,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
    micro_batches: int = 1,
    seed: int = 0,
    dropout: float = 0.0,
    products: str = SAME,
    initialize: bool = True,
    masters: bool = False,
    adapters: bool = False,
    trains: bool = True,
) -> Engine:
    """Build the model of a shape over the mesh, with this rank's part of the initial weights of (seed, name).

    The model is cut and sharded before it gets memory, so only this rank's part ever has any.

    layout.compile=auto and cuda_graphs=auto are off: which is faster depends on the recipe and the device, and only a
    plan knows these. `planner.step.predict.predict(plan).settled.layout` leaves neither open and is what `train` takes.

    Args:
        reduce_dtype: Gradients are summed in it over ranks and micro-batches. None = `dtype`. Without sums they stay in
            `dtype`.
        micro_batches: Number of micro-batches whose gradients are summed.
        products: A word of recipe.products.
        masters: ZeRO's shards are fp32 and are gathered in `dtype` (`shards_are_masters`).
        adapters: Adapters get their initial values even when `initialize` is off.
        trains: False = all parameters are frozen.

    Raises:
        IllegalLayout: One rank has both ends of a tied head, and data parallelism as well.
    """
    if shares_tied_ends(shape, layout):  # a plan refuses it too; unchecked, it would silently train wrong
        raise IllegalLayout(f"layout.schedule={layout.schedule} with a tied head cannot have data parallelism")
    device = torch.device(device)
    mesh = mesh or make_mesh(layout)
    layout = resolve_auto(layout, device, mesh["world"])
    mesh = replace(mesh, layout=layout)
    rank_boxes = boxes(shape, layout, mesh.rank)
    sizes = {name: box.sizes for name, box in rank_boxes.items()}
    sharers = {part.parameter.name: part.ranks for part in held_by(shape, layout, mesh.rank) if part.parameter.scheme}
    # None = shards are gathered in the dtype they have.
    gathered = dtype if masters and layout.zero and dtype != torch.float32 else None
    stages = []
    with compat.real_tensors():  # skeletons hold no memory, so a dry run need not see them
        # Each stage starts as the whole model without memory, loses the layers of other stages, then shrinks to its
        # boxes.
        for number in own_stages(layout, mesh["pp"].index):
            whole = skeleton(shape, dropout=dropout, kernels=layout.kernels, products=products)
            stage = cut(whole, layout, number)
            if not trains:
                stage.requires_grad_(False)
            shrink(stage, torch.float32 if gathered else dtype, sizes, frozen=dtype)
            # Codes that several ranks share become parameters of bytes, which ZeRO shards and gathers like all others.
            for name, codes in frozen_codes([stage], shape).items():
                codes.cut(rank_boxes[name])
                if sharers[name] > 1:
                    codes.put_into_run(dtype)
            stages.append(stage)
    # Without a wider dtype torch reduces gradients as they are, with no second buffer.
    summed = None if reduce_dtype == dtype else reduce_dtype
    engine = parallelize(stages, mesh, rank_boxes, device, summed, micro_batches, gathered)
    if initialize or adapters:
        initialize_boxes(engine, seed, adapters=not initialize)
    if initialize:
        draw_codes(engine, seed, dtype)
        # Last, since DoRA's magnitudes are the row lengths of the matrices drawn above.
        measure_rows(engine)
    return engine


@torch.no_grad()
def draw_codes(engine: Engine, seed: int, dtype: torch.dtype) -> None:
    """Fill frozen matrices that are held as codes with initial weights of (seed, name), quantized from `dtype`."""
    shape = engine.model.shape
    for name, weight in frozen_codes(engine.stages, shape).items():
        drawn = torch.zeros(weight.size, dtype=dtype, device=weight.device)
        fill_initial(drawn, name, shape, seed, whole=weight.size)
        data.take_codes(weight, quantize_matrix(name, drawn, weight.scheme))


@torch.no_grad()
def measure_rows(engine: Engine) -> None:
    """Set DoRA's magnitudes to the row lengths of the matrices. Every rank of a tp group calls this."""
    lora = engine.model.shape.lora
    if lora is None or not lora.dora:
        return
    shards = engine.local_boxes()
    for number, block in chain.from_iterable(stage.layers.items() for stage in engine.stages):
        linears = ((name, layer) for name, layer in block.named_modules() if isinstance(layer, Linear))
        adapted = {name: (layer, layer.lora) for name, layer in linears if isinstance(layer.lora, LoRA)}
        lengths = {name: data.local(low.magnitude.detach()) for name, (_, low) in adapted.items()}
        with data.gather_codes(block):
            for name, (layer, low) in adapted.items():
                matrix = layer.matrix if layer.quantized else data.local(layer.weight.detach())
                rows = low.row_squares(low.whole(matrix)).sqrt().to(lengths[name].dtype)
                if layer.quantized:  # codes are gathered whole, but the lengths may be sharded
                    magnitude = f"layers.{number}.{name}.lora.magnitude"
                    start = shards[magnitude].offsets[0] - engine.boxes[magnitude].offsets[0]
                    rows = rows.narrow(0, start, len(lengths[name]))
                lengths[name].copy_(rows)


def on_one_device(model: Transformer, layout: Layout | None = None) -> Engine:
    """Return an engine around a whole existing model, with the layout's recomputation and compilation."""
    layout = layout or Layout(compile="off")
    mesh = make_mesh(layout, rank=0)
    return parallelize([model], mesh, boxes(model.shape, layout, mesh.rank), next(model.parameters()).device)


def initialize_boxes(engine: Engine, seed: int, *, adapters: bool = False) -> None:
    """Give every parameter its part of the initial value of (seed, name). `adapters`: only those."""
    parameters = engine.parameters
    with torch.no_grad():
        for name, box in engine.local_boxes().items():
            parameter = parameters[name]
            if adapters and not parameter.requires_grad:
                continue
            shard = data.local(parameter)
            fill_initial(shard, name, engine.model.shape, seed, whole=box.whole, offsets=box.offsets)
            if engine.gathered_dtype is not None:
                # As on one device, where masters start equal to the rounded weights.
                shard.copy_(shard.to(engine.gathered_dtype))


def parallelize(
    stages: Sequence[Transformer],
    mesh: Mesh,
    rank_boxes: dict[str, Box],
    device: torch.device,
    reduce_dtype: torch.dtype | None = None,
    micro_batches: int = 1,
    gathered: torch.dtype | None = None,
) -> Engine:
    """Lay this rank's stages over the mesh. Without a pipeline there is one stage, the model.

    The parameters of the stages are boxes. Skeletons get memory for the part that stays on this rank.
    """
    for stage in stages:
        with compat.real_tensors():
            apply(stage, mesh, device, reduce_dtype, gathered)
        # Memory comes last: sharding has left only this rank's part of each parameter.
        if next(stage.parameters()).is_meta:
            materialize(stage, device)
    # Only now: allocating memory makes new parameters, which would part the two ends again.
    share_embedding(stages)
    shape = stages[0].shape
    wide = reduce_dtype if adds_gradients(mesh.layout, micro_batches) else None
    replicas = replicate(stages, mesh, wide) if data.is_needed(mesh) and not mesh.layout.zero else ()
    sums = tuple(total for stage in stages if wide for total in data.widen_gradients(stage, mesh, wide))
    # Either way a first run loads code, which must not happen while a transfer is open (executor.py).
    loads_code = device.type == "cuda" or is_compiled(mesh.layout, device)
    return Engine(
        stages=tuple(stages),
        mesh=mesh,
        boxes=rank_boxes,
        reduce_dtype=reduce_dtype,
        gathered_dtype=gathered,
        replicas=replicas,
        sums=sums,
        pipeline=make_pipeline(stages, mesh, replicas, gathered, warms_up=loads_code) if mesh["pp"].size > 1 else None,
        graphs=pass_graphs(stages[0], mesh, device, replicas),
        common=tuple(
            (shared, make_group(shared.axis, shared.ranks, mesh))
            for shared in list_common(shape, mesh.layout, mesh.rank)
        ),
    )


def apply(
    model: Transformer, mesh: Mesh, device: torch.device, reduce_dtype: torch.dtype | None,
    gathered: torch.dtype | None,
) -> None:  # fmt: skip
    """Apply every axis except the pipeline, in the order of decision 4."""
    layout, kind = mesh.layout, simulated_kind() or device.type
    # Seams first, then the call of whole blocks, and FSDP last: its hooks stay outside of what is compiled.
    if layout.tp > 1:
        pieces = partial(layout.tp_pieces, hidden=model.shape.hidden, device=kind)
        slices = SequenceSlices(mesh["tp"], layout.sp, pieces)
        apply_tensor_parallel(model, slices, own_tokens_in_experts=layout.ep > 1)
    if layout.cp > 1:
        apply_context_parallel(model, mesh["cp"], layout)
    if model.shape.moe:
        in_pieces = partial(layout.ep_pieces, hidden=model.shape.hidden, moe=model.shape.moe, device=kind)
        apply_expert_parallel(model, mesh["ep"], in_pieces)
        apply_sequence_groups(model, mesh["cp"], *([mesh["tp"]] if layout.ep > 1 else []))
    apply_block_call(model, layout, device)
    if layout.zero and data.is_needed(mesh):
        data.apply_data_parallel(model, mesh, device, reduce_dtype, gathered)


def apply_context_parallel(model: Transformer, group: Group, layout: Layout) -> None:
    """Replace the mask and the attention of whole sequences by those of shared ones."""
    model.seams.mask = mask_maker(group, layout.context_split)
    model.seams.attend = context_attend(group, layout.context)
    model.seams.whole_sums = partial(whole_sums, group=group)


def layout_notes(layout: Layout) -> list[str]:
    """Return notes on settings of the layout that do not have the effect their names promise."""
    notes = []
    if layout.pp > 1 and layout.schedule == "interleaved" and layout.vp == 1:
        notes.append("layout.schedule=interleaved with layout.vp=1 is 1f1b: give each rank layout.vp=2 or more")
    if layout.recompute != layout.acting_recompute:
        notes.append(
            "layout.recompute=selective saves nothing here: this attention stores no S x S weights to make again. "
            "layout.recompute=norms, all-but-attention and full save memory; `meshwright plan` says how much."
        )
    return notes


def apply_block_call(model: Transformer, layout: Layout, device: torch.device) -> None:
    """Wrap the calls of blocks in recomputation, then in compilation. Hooks of a block stay outside.

    The first blocks are recomputed, as many as the layout says. The backward pass starts at the last blocks, so their
    activations are freed before anything is recomputed: the two never take memory at the same time.
    """
    compiled = is_compiled(layout, device) and can_be_compiled(model.shape)
    if layout.recompute == "all-but-attention" and not compiled:
        model.seams.attend = keep_attention(model.seams.attend or model.kernels.attend)
    make: Callable[[str], BlockCall] = block_call
    if compiled:
        prepare()
        make = partial(compile_call, apart=blocks_exclude_experts(layout))
    # The remaining blocks keep everything, as far as memory allows.
    first = model.blocks[: layout.recomputed(len(model.blocks))]
    if layout.acting_recompute == "selective":
        # One function for all blocks, so that they share compiled code.
        attend = recompute_attention(model.kernels.attend)
        for block in first:
            block.attention.kernels = replace(block.attention.kernels, attend=attend)
    rest = make(unrecomputed_policy(layout, model.shape))
    call = rest if layout.recompute in ("none", "selective") else make(layout.recompute)
    model.seams.call = choose_call(first, call, rest) if 0 < len(first) < len(model.blocks) else call
    if layout.offload == "activations":
        model.seams.call = Offload(model, model.seams.call, device)


def round_weights(engine: Engine, scheme: str) -> None:
    """Have an engine round every matrix that `meshwright quantize` rounds, as recipe.fake_quantize asks.

    Each part is rounded to the numbers that the whole matrix would be rounded to.
    """
    if scheme == NO_SCHEME:
        return
    shape, layout = engine.model.shape, engine.mesh.layout
    scales = {
        parameter: shared_scales(parameter, shape, SCHEMES[scheme], layout.tp, layout.ep)
        for parameter in parameters(shape)
        if parameter.matrices is not None
    }
    largest = partial(engine.mesh["tp"].all_reduce, op="max")
    cut = {}
    for parameter, shared in scales.items():
        if any(shared):
            codes = CodesCut(scheme=SCHEMES[scheme], box=engine.boxes[parameter.name])
            part = MatrixPart(codes, largest) if shared.numbers else None
            cut[parameter.name] = FakeQuantized(SCHEMES[scheme], part, largest if shared.rows else None)
    put_fake_quantization(engine.stages, shape, scheme, cut)
