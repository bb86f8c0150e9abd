"""How a layout is put onto a model: one screen, in a stated order (docs/decisions/0004-parallel-engine.md)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from meshwright import compat
from meshwright.kernels.linear import SAME
from meshwright.kernels.target import acts
from meshwright.kernels.weight_codes import quantize_matrix
from meshwright.model import Transformer
from meshwright.model.init import fill_initial
from meshwright.model.linear import Linear
from meshwright.model.low_rank import LoRA
from meshwright.model.quantized_weights import frozen_codes
from meshwright.model.seams import BlockCall
from meshwright.model.transformer import materialize, shrink, skeleton
from meshwright.parallel import data
from meshwright.parallel.compiling import compiled_call, is_compiled, kept_by_all, prepare, without_auto
from meshwright.parallel.context import mask_maker, whole_sums
from meshwright.parallel.engine import Engine
from meshwright.parallel.expert import apply_expert_parallel, apply_sequence_groups
from meshwright.parallel.group import Group
from meshwright.parallel.mesh import Mesh, make_group, make_mesh
from meshwright.parallel.offload import Offload
from meshwright.parallel.pass_graphs import pass_graphs
from meshwright.parallel.passes import make_pipeline
from meshwright.parallel.recompute import attended_again, block_call, kept_attention, on_some
from meshwright.parallel.replicas import replicate
from meshwright.parallel.ring import context_attend
from meshwright.parallel.sequence import SequenceSlices
from meshwright.parallel.stages import cut, share_embedding
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.spec.boxes import Box, boxes
from meshwright.spec.compiled_blocks import can_be_compiled, experts_stay_apart
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.held import adds_gradients, common
from meshwright.spec.held import held as held_by
from meshwright.spec.layout import Layout
from meshwright.spec.legal import shares_tied_ends
from meshwright.spec.places import own_stages
from meshwright.spec.shape import ModelShape


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
    """The model of a shape laid over the mesh, with this rank's part of the initial weights of (seed, name).

    Only what stays on this rank ever has memory: the model is cut and sharded before it gets any. Gradients are summed
    in `reduce_dtype` (None = dtype) over ranks and up to so many micro-batches; where there is nothing to sum they stay
    in `dtype`. `products` as recipe.products. IllegalLayout where one rank has both ends of a tied head and
    data-parallel ranks beside it. `masters`: shards of ZeRO are fp32 and gathered in `dtype`
    (spec.held.shards_are_masters). `adapters`: these are given their initial values where all else is left unset.
    Not `trains`: all of it is frozen.
    layout.compile=auto and cuda_graphs=auto are off: which is faster depends on the recipe and the device, that only a
    plan knows. `planner.step.predict.predict(plan).settled.layout` leaves neither open, as `train` takes it.
    """
    if shares_tied_ends(shape, layout):  # legal refuses it, too; unasked, this would train wrong and say nothing
        raise IllegalLayout(f"layout.schedule={layout.schedule} with a tied head cannot have data parallelism")
    device = torch.device(device)
    mesh = mesh or make_mesh(layout)
    layout = without_auto(layout, device, mesh["world"])
    mesh = replace(mesh, layout=layout)
    held = boxes(shape, layout, mesh.rank)
    sizes = {name: box.sizes for name, box in held.items()}
    gathered = dtype if masters and layout.zero and dtype != torch.float32 else None
    stages = []
    with compat.real_tensors():  # a dry run's begin where memory does
        for number in own_stages(layout, mesh["pp"].index):
            whole = skeleton(shape, dropout=dropout, kernels=layout.kernels, products=products)
            stage = cut(whole, layout, number)
            if not trains:
                stage.requires_grad_(False)
            shrink(stage, torch.float32 if gathered else dtype, sizes, frozen=dtype)
            put_codes(stage, shape, layout, mesh.rank, held, dtype)
            stages.append(stage)
    summed = None if reduce_dtype == dtype else reduce_dtype
    engine = parallelize(stages, mesh, held, device, summed, micro_batches, gathered)
    if initialize or adapters:
        initialize_boxes(engine, seed, adapters=not initialize)
    if initialize:
        draw_codes(engine, seed, dtype)
        measure_rows(engine)
    return engine


def put_codes(
    stage: Transformer, shape: ModelShape, layout: Layout, rank: int, held: dict[str, Box], dtype: torch.dtype
) -> None:
    """Room for what a rank holds of frozen matrices that are codes: as parameters in `dtype`, of nothing but bytes,
    where ranks share them, so that ZeRO shards and gathers them as it does all others."""
    sharers = {one.parameter.name: one.ranks for one in held_by(shape, layout, rank) if one.parameter.scheme}
    for name, codes in frozen_codes([stage], shape).items():
        codes.cut(held[name])
        if sharers[name] > 1:
            codes.put_into_run(dtype)


@torch.no_grad()
def draw_codes(engine: Engine, seed: int, dtype: torch.dtype) -> None:
    """Give frozen matrices that are held as codes the initial weights of (seed, name) in `dtype`, quantized."""
    shape = engine.model.shape
    for name, weight in frozen_codes(engine.stages, shape).items():
        drawn = torch.zeros(weight.size, dtype=dtype, device=weight.device)
        fill_initial(drawn, name, shape, seed, whole=weight.size)
        data.take_codes(weight, quantize_matrix(name, drawn, weight.scheme))


@torch.no_grad()
def measure_rows(engine: Engine) -> None:
    """Have DoRA begin as its matrices are: the lengths of their rows, known once the weights are. Every rank of a tp
    group makes the same calls."""
    lora = engine.model.shape.lora
    if lora is None or not lora.dora:
        return
    shards = engine.local_boxes()
    for number, block in chain.from_iterable(stage.layers.items() for stage in engine.stages):
        every = ((name, one) for name, one in block.named_modules() if isinstance(one, Linear))
        adapted = {name: (layer, layer.lora) for name, layer in every if isinstance(layer.lora, LoRA)}
        lengths = {name: data.local(low.magnitude.detach()) for name, (_, low) in adapted.items()}
        with data.codes_gathered(block):
            for name, (layer, low) in adapted.items():
                matrix = layer.matrix if layer.quantized else data.local(layer.weight.detach())
                found = low.row_squares(low.whole(matrix)).sqrt().to(lengths[name].dtype)
                if layer.quantized:  # whole, and lengths may be sharded
                    own = f"layers.{number}.{name}.lora.magnitude"
                    start = shards[own].offsets[0] - engine.boxes[own].offsets[0]
                    found = found.narrow(0, start, len(lengths[name]))
                lengths[name].copy_(found)


def on_one_device(model: Transformer, layout: Layout | None = None) -> Engine:
    """An engine around a whole model that exists already, with the layout's recomputation and compilation."""
    layout = layout or Layout(compile="off")
    mesh = make_mesh(layout, rank=0)
    return parallelize([model], mesh, boxes(model.shape, layout, mesh.rank), next(model.parameters()).device)


def initialize_boxes(engine: Engine, seed: int, *, adapters: bool = False) -> None:
    """Give every parameter its part of the initial value of (seed, name); `adapters`: these alone."""
    parameters = engine.parameters
    with torch.no_grad():
        for name, box in engine.local_boxes().items():
            parameter = parameters[name]
            if adapters and not parameter.requires_grad:
                continue
            own = data.local(parameter)
            fill_initial(own, name, engine.model.shape, seed, whole=box.whole, offsets=box.offsets)
            if engine.gathered_dtype is not None:
                own.copy_(own.to(engine.gathered_dtype))  # as on one device, where masters begin as the weights do


def parallelize(
    stages: Sequence[Transformer],
    mesh: Mesh,
    held: dict[str, Box],
    device: torch.device,
    reduce_dtype: torch.dtype | None = None,
    micro_batches: int = 1,
    gathered: torch.dtype | None = None,
) -> Engine:
    """Lay this rank's stages (without a pipeline: the model), whose parameters are boxes, over the mesh. Skeletons are
    given memory, for what stays here."""
    for stage in stages:
        with compat.real_tensors():
            apply(stage, mesh, device, reduce_dtype, gathered)
        if next(stage.parameters()).is_meta:
            materialize(stage, device)
    share_embedding(stages)
    shape = stages[0].shape
    wide = reduce_dtype if adds_gradients(mesh.layout, micro_batches) else None
    replicas = replicate(stages, mesh, wide) if data.is_needed(mesh) and not mesh.layout.zero else ()
    sums = tuple(one for stage in stages if wide for one in data.widen_gradients(stage, mesh, wide))
    loads_code = device.type == "cuda" or is_compiled(mesh.layout, device)
    return Engine(
        stages=tuple(stages),
        mesh=mesh,
        boxes=held,
        reduce_dtype=reduce_dtype,
        gathered_dtype=gathered,
        replicas=replicas,
        sums=sums,
        pipeline=make_pipeline(stages, mesh, replicas, gathered, warms_up=loads_code) if mesh["pp"].size > 1 else None,
        graphs=pass_graphs(stages[0], mesh, device, replicas),
        common=tuple((one, make_group(one.axis, one.ranks, mesh)) for one in common(shape, mesh.layout, mesh.rank)),
    )


def apply(
    model: Transformer, mesh: Mesh, device: torch.device, reduce_dtype: torch.dtype | None,
    gathered: torch.dtype | None,
) -> None:  # fmt: skip
    """Every axis but the pipeline's, in the order that decision 4 gives."""
    layout, kind = mesh.layout, acts() or device.type
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
    """Put the mask and the attention of sequences that are shared in place of those of whole ones."""
    model.seams.mask = mask_maker(group, layout.context_split)
    model.seams.attend = context_attend(group, layout.context)
    model.seams.whole_sums = partial(whole_sums, group=group)


def layout_notes(layout: Layout) -> list[str]:
    """What a run should know of settings that do not do what their names say."""
    found = []
    if layout.pp > 1 and layout.schedule == "interleaved" and layout.vp == 1:
        found.append("layout.schedule=interleaved with layout.vp=1 is 1f1b: give each rank layout.vp=2 or more")
    if layout.recompute != layout.acting_recompute:
        found.append(
            "layout.recompute=selective saves nothing here: this attention stores no S x S weights to make again. "
            "layout.recompute=norms, all-but-attention and full save memory; `meshwright plan` says how much."
        )
    return found


def apply_block_call(model: Transformer, layout: Layout, device: torch.device) -> None:
    """Recomputation around the arithmetic of the stage's first blocks, of as many as the layout says, then compilation
    of both; hooks of the block stay outside. The pass back begins with the last blocks: what they keep is gone before
    anything is made again, so that the two never stand beside each other."""
    compiled = is_compiled(layout, device) and can_be_compiled(model.shape)
    if layout.recompute == "all-but-attention" and not compiled:
        model.seams.attend = kept_attention(model.seams.attend or model.kernels.attend)
    make: Callable[[str], BlockCall] = block_call
    if compiled:
        prepare()
        make = partial(compiled_call, apart=experts_stay_apart(layout))
    first = model.blocks[: layout.recomputed(len(model.blocks))]
    if layout.acting_recompute == "selective":
        attend = attended_again(model.kernels.attend)  # one for all, so that compiled blocks share their code
        for block in first:
            block.attention.kernels = replace(block.attention.kernels, attend=attend)
    rest = make(kept_by_all(layout, model.shape))
    call = rest if layout.recompute in ("none", "selective") else make(layout.recompute)
    model.seams.call = on_some(first, call, rest) if 0 < len(first) < len(model.blocks) else call
    if layout.offload == "activations":
        model.seams.call = Offload(model, model.seams.call, device)
