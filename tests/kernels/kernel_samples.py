"""One launch of every kernel as training makes it, bf16, sizes of a Llama-3-8B: what is compiled for other GPUs."""

from meshwright.kernels.triton import (
    flash,
    flash_backward,
    gated,
    grouped,
    loss_rows,
    mean_norm,
    merging,
    narrow_update,
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
        restoring.restore_rows, types("out", "scales zeros numbers", codes="*u8"), {"ZEROS": True, "BLOCK": ELEMENTS},
        restoring.WARPS,
    ),
    "grouped_rows": Sample(grouped.grouped_rows, GROUPED, {**GROUPED_SIZES, "in_stride": 1}, 4, 3, True, ("experts",)),
    "grouped_rows_transposed": Sample(
        grouped.grouped_rows, GROUPED, {**GROUPED_SIZES, "out_stride": 1}, 4, 3, True, ("experts",)
    ),
    "grouped_weights": Sample(grouped.grouped_weights, GROUPED, GROUPED_SIZES, 4, 3, True),
}  # fmt: skip
