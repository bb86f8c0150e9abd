"""Every published model at small sizes, with all features that define it."""

from dataclasses import replace

from meshwright.spec import MLAShape, ModelShape, presets

VOCAB = 61


def shrink(name: str) -> ModelShape:
    """Return the shape of a preset reduced to some ten thousand parameters."""
    shape = presets.model(name)
    scaling = shape.rope_scaling and replace(shape.rope_scaling, original_positions=16)
    moe = shape.moe and replace(
        shape.moe, experts=8, top_k=min(shape.moe.top_k, 3), ffn=12, groups=min(shape.moe.groups, 4),
        top_groups=min(shape.moe.top_groups, 2), first_dense=min(shape.moe.first_dense, 1),
    )  # fmt: skip
    mla = MLAShape(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=5) if shape.mla else None
    own_width = shape.head_dim * shape.heads != shape.hidden
    return replace(
        shape,
        vocab=VOCAB, layers=3, hidden=24, heads=4, kv_heads=4 if shape.kv_heads == shape.heads else 2,
        head_dim=10 if own_width else 6, ffn=40, max_positions=64, window=5 if shape.window else 0,
        window_from_layer=min(shape.window_from_layer, 1), rope_scaling=scaling, moe=moe, mla=mla,
    )  # fmt: skip
