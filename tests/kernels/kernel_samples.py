"""One launch of every kernel as training makes it, bf16, sizes of a Llama-3-8B: what is compiled for other GPUs."""

from meshwright.kernels.triton import (
    flash,
    flash_backward,
    gated,
    grouped,
    int8_product,
    loss_rows,
    mean_norm,
    merging,
    narrow_update,
    packed_product,
    paged,
    permute,
    restoring,
    root_norm,
    rotary,
)
from meshwright.kernels.triton.blocks import ELEMENTS, rows_a_program, warps
from tests.kernels.cross_compiled import Sample

WIDTH = 4096
NARROW, WIDE = "*bf16", "*fp32"


def types(narrow: str = "", wide: str = "", **others: str) -> dict[str, str]:
    """Types by the names of arguments, which stand in one string."""
    return dict.fromkeys(narrow.split(), NARROW) | dict.fromkeys(wide.split(), WIDE) | others


ROW = {"ROWS": rows_a_program(WIDTH), "BLOCK": WIDTH}
BACK = {"ROWS": max(1, rows_a_program(WIDTH) // 2), "BLOCK": WIDTH, "STAGES": 2, "AGAIN": False}
MEAN_BACK = {name: value for name, value in BACK.items() if name != "AGAIN"}
LOSS = types("logits", "factors losses found sums", targets="*i64", smoothing="fp32", z="fp32")
LOSS_BLOCK = {"BLOCK": loss_rows.BLOCK}
NORM = types("x added weight bias out total gradient beside x_gradient", "scales means parts", eps="fp32")
GATED = types("gate up out gradient gate_gradient up_gradient product x found")
FLASH = types("q k v out gradient q_gradient k_gradient v_gradient", "lse inner", borders="*i32", scale="fp32")
FLASH_SIZES = {
    "GROUP": 4, "CAUSAL": True, "WIDE": False, "QUERIES": flash.QUERIES, "KEYS": flash.KEYS, "BLOCK": 128,
}  # fmt: skip
COPIES = types("x out rows gradient rows_gradient", "weights weights_gradient", order="*i64", inverse="*i64")
GROUPED = types("rows weights out gradient", ends="*i32")
GROUPED_SIZES = {"WIDE": False, "ROWS": grouped.ROWS, "COLUMNS": grouped.COLUMNS, "INNER": grouped.INNER}
NARROW_STATES = types(
    wide="first_scales second_scales books step divide_by skip gradient", **dict.fromkeys(
        ("rate", "beta1", "rest1", "beta2", "rest2", "log_beta1", "log_beta2", "epsilon", "decay"), "fp32"), seed="i64",
)  # fmt: skip
BITS, CODES = {"first": "*i16", "second": "*i16"}, {"first": "*u8", "second": "*u8"}

PACKED = types("x scales bias", table="*fp16", codes="*u8", zeros="*u8")
INT8 = types("x scales kept bias", "x_scales", x_codes="*i8", codes="*i8", apart="*i32")
INT8_FORM = {"KEPT": True, "BIAS": False, "WIDE": False, "OUTLIERS": int8_product.OUTLIERS}


def packed_sample(rows: int, group: int, kind: int, shift: int, **others: str) -> Sample:
    """Of so many rows. K is cut for a few of them."""
    tile = packed_product.tile_of(rows, WIDTH if rows < 1000 else 14336, group, 132)
    constants = {
        "CODES": kind, "ZEROS": shift, "BIAS": True, "PART": rows <= 16, "WIDE": False, "COLUMNS": tile.columns,
        "ROWS": tile.rows, "INNER": tile.inner,
    }  # fmt: skip
    made = PACKED | {"out": WIDE if rows <= 16 else NARROW} | others
    return Sample(packed_product.packed_rows, made, constants, tile.warps, tile.stages, True, ("group",))


def int8_sample(rows: int) -> Sample:
    """The same of whole numbers, with columns of outliers."""
    tile = int8_product.tile_of(rows, WIDTH if rows < 1000 else 14336, 132)
    constants = INT8_FORM | {
        "PART": rows <= 16, "ALONGSIDE": int8_product.ALONGSIDE, "COLUMNS": tile.columns, "ROWS": tile.rows,
        "INNER": tile.inner,
    }  # fmt: skip
    made = INT8 | {"out": "*i32" if rows <= 16 else NARROW}
    return Sample(int8_product.int8_rows, made, constants, tile.warps, tile.stages, True, ("outliers",), True)


PAGED = types(
    "q keys values out", "key_scales value_scales lse parts", tables="*i64", offsets="*i64", last="*i64", scale="fp32"
)  # fmt: skip


def paged_sample(width: int, group: int, codes: int, kind: str) -> Sample:
    """A few query heads are too few rows for the larger products of tensor cores: those of Ampere multiply them."""
    constants = {
        "GROUP": group, "CODES": codes, "PARTS": True, "WIDE": False, "SPLIT": paged.SPLIT, "HEADS": paged.LEAST,
        "KEYS": paged.keys_at_once(width), "BLOCK": max(16, 1 << (width - 1).bit_length()),
    }  # fmt: skip
    made = PAGED | {"keys": kind, "values": kind, "out": WIDE}
    return Sample(paged.paged_rows, made, constants, paged.WARPS, paged.STAGES, unaligned=("rows", "window"))


ROUNDED = types("x", "scales", left_out="*u8")

SAMPLES = {
    "loss_rows": Sample(
        loss_rows.loss_rows, LOSS,
        {"IGNORED": -100, "GRADIENT": True, "FACTORS": False, "SMOOTH": False, **LOSS_BLOCK}, 16,
    ),
    "gather_rows": Sample(loss_rows.gather_rows, LOSS, LOSS_BLOCK, 16),
    "gradient_rows": Sample(loss_rows.gradient_rows, LOSS, LOSS_BLOCK, 16),
    "root_norm_forward": Sample(root_norm.root_norm_forward, NORM, {"ADD": False, **ROW}, warps(2 * WIDTH)),
    "add_root_norm_forward": Sample(root_norm.root_norm_forward, NORM, {"ADD": True, **ROW}, warps(2 * WIDTH)),
    "root_norm_backward": Sample(
        root_norm.root_norm_backward, NORM, {"ADD": False, "WEIGHT": True, **BACK}, warps(2 * WIDTH)
    ),
    "add_root_norm_backward": Sample(
        root_norm.root_norm_backward, NORM, {"ADD": True, "WEIGHT": True, **BACK}, warps(2 * WIDTH)
    ),
    "wide_root_norm_backward": Sample(
        root_norm.root_norm_backward, NORM,
        {"ADD": False, "WEIGHT": True, "ROWS": 1, "BLOCK": 16384, "STAGES": 1, "AGAIN": True}, warps(2 * 16384),
    ),
    "mean_norm_forward": Sample(mean_norm.mean_norm_forward, NORM, ROW, warps(WIDTH)),
    "mean_norm_backward": Sample(mean_norm.mean_norm_backward, NORM, MEAN_BACK, warps(2 * WIDTH)),
    "swiglu_forward": Sample(gated.swiglu_forward, GATED, {"BLOCK": ELEMENTS}, gated.WARPS),
    "swiglu_backward": Sample(gated.swiglu_backward, GATED, {"PRODUCT": True, "BLOCK": ELEMENTS}, gated.WARPS),
    "gelu_forward": Sample(gated.gelu_forward, GATED, {"TANH": False, "BLOCK": ELEMENTS}, gated.WARPS),
    "gelu_backward": Sample(gated.gelu_backward, GATED, {"TANH": True, "BLOCK": ELEMENTS}, gated.WARPS),
    "rotate_rows": Sample(
        rotary.rotate_rows, types("q q_out k k_out", "cos sin"),
        {"SIGN": 1.0, "STEP": 1, "HEADS": 32, "BLOCK": 64}, 4,
    ),
    "merge_rows": Sample(
        merging.merge_rows, types("part", "out lse part_lse shift"), {"ROWS": merging.ROWS, "BLOCK": 128}, 4
    ),
    "flash_forward": Sample(flash.flash_forward, FLASH, FLASH_SIZES, flash.WARPS, 2, True),
    "inner_rows": Sample(flash_backward.inner_rows, FLASH, {"BLOCK": 128}, 4),
    "queries_backward": Sample(flash_backward.queries_backward, FLASH, FLASH_SIZES, flash.WARPS, 2, True),
    "keys_backward": Sample(
        flash_backward.keys_backward, FLASH, FLASH_SIZES | {"QUERIES": flash.BESIDE_KEYS}, flash.WARPS, 2, True
    ),
    "gather_copies": Sample(permute.gather_copies, COPIES, {"COPIES": 2, "BLOCK": permute.BLOCK}, 4),
    "sum_copies": Sample(permute.sum_copies, COPIES, {"WEIGHTS": True, "COPIES": 2, "BLOCK": permute.BLOCK}, 4),
    "combine_backward": Sample(permute.combine_backward, COPIES, {"COPIES": 2, "BLOCK": permute.BLOCK}, 4),
    "narrow_rows_bf16": Sample(
        narrow_update.narrow_rows, NARROW_STATES | BITS | {"weight": WIDE, "copy": NARROW},
        {"FORMAT": 1, "WEIGHT": 1, "ROWS": 4, "BLOCK": 256}, 4,
    ),
    "narrow_rows_int8": Sample(
        narrow_update.narrow_rows, NARROW_STATES | CODES | {"weight": "*i16", "copy": NARROW},
        {"FORMAT": 2, "WEIGHT": 2, "ROWS": 4, "BLOCK": 256}, 4,
    ),
    "restore_rows": Sample(
        restoring.restore_rows, types("out", "scales zeros numbers", codes="*u8"), {"ZEROS": 1, "BLOCK": ELEMENTS},
        restoring.WARPS,
    ),
    "restore_rows_packed_zeros": Sample(
        restoring.restore_rows, types("out scales", "numbers", codes="*u8", zeros="*u8"),
        {"ZEROS": 2, "BLOCK": ELEMENTS}, restoring.WARPS,
    ),
    "grouped_rows": Sample(grouped.grouped_rows, GROUPED, {**GROUPED_SIZES, "in_stride": 1}, 4, 3, True, ("experts",)),
    "grouped_rows_transposed": Sample(
        grouped.grouped_rows, GROUPED, {**GROUPED_SIZES, "out_stride": 1}, 4, 3, True, ("experts",)
    ),
    "grouped_weights": Sample(grouped.grouped_weights, GROUPED, GROUPED_SIZES, 4, 3, True),
    "packed_rows_whole_zeros": packed_sample(1, 32, packed_product.WHOLE, packed_product.PACKED),
    "packed_rows_real_zeros": packed_sample(16, 32, packed_product.WHOLE, packed_product.REAL, zeros="*fp16"),
    "packed_rows_symmetric": packed_sample(8, 128, packed_product.WHOLE, packed_product.FIXED),
    "packed_rows_nf4": packed_sample(1, 64, packed_product.TABLE, packed_product.FIXED),
    "packed_rows_e4m3": packed_sample(1, 0, packed_product.E4M3, packed_product.FIXED),
    "packed_rows_64": packed_sample(64, 32, packed_product.WHOLE, packed_product.PACKED),
    "packed_rows_128": packed_sample(128, 128, packed_product.WHOLE, packed_product.FIXED),
    "packed_rows_1024": packed_sample(1024, 32, packed_product.WHOLE, packed_product.REAL, zeros="*fp16"),
    "packed_rows_128_nf4": packed_sample(128, 64, packed_product.TABLE, packed_product.FIXED),
    "packed_rows_128_e4m3": packed_sample(128, 0, packed_product.E4M3, packed_product.FIXED),
    "sum_parts": Sample(
        packed_product.sum_parts, types("bias out", "parts"), {"BIAS": True, "BLOCK": ELEMENTS}, 4, unaligned=("count",)
    ),
    "round_rows_int8": Sample(
        int8_product.round_rows, ROUNDED | {"codes": "*i8"},
        {"SKIPS": True, "WHOLE": True, "BLOCK": int8_product.BLOCK}, 8,
    ),
    "round_rows_e4m3": Sample(
        int8_product.round_rows, ROUNDED | {"codes": "*u8"},
        {"SKIPS": False, "WHOLE": False, "BLOCK": int8_product.BLOCK}, 8,
    ),
    "int8_rows_few": int8_sample(16),
    "int8_rows_some": int8_sample(64),
    "int8_rows_128": int8_sample(128),
    "int8_rows_many": int8_sample(4096),
    "finish_parts": Sample(
        int8_product.finish_parts, INT8 | {"parts": "*i32", "out": NARROW},
        INT8_FORM | {"COLUMNS": 64, "ROWS": 16}, 4, unaligned=("count", "outliers"),
    ),
    "paged_rows_64": paged_sample(64, 1, 0, NARROW),
    "paged_rows_80": paged_sample(80, 7, 0, NARROW),
    "paged_rows_128": paged_sample(128, 4, 0, NARROW),
    "paged_rows_256": paged_sample(256, 8, 0, NARROW),
    "paged_rows_int8": paged_sample(128, 4, 1, "*i8"),
    "paged_rows_fp8": paged_sample(128, 4, 2, "*u8"),
    "add_splits": Sample(paged.add_splits, PAGED, {"SPLIT": paged.SPLIT, "BLOCK": 128}, 1, unaligned=("rows",)),
}  # fmt: skip
