"""Products with quantized matrices on a GPU. Which form runs depends on the number of rows.

    4 bits, one and two rows   codes become numbers in the threads that add them up (triton/packed_product.py)
    4 bits, up to FUSED_ROWS   codes become operands of tensor cores inside the product (triton/packed_product.py)
    4 bits, more rows          a slab of the matrix is restored, which the cache holds, and torch multiplies with it
    int8                       rows are rounded in one kernel and multiplied in another (triton/int8_product.py)
    fp8                        as int8, by torch's product; without units for it as 4 bits, up to E4M3_ROWS

The second and third form round a weight to the same number, the first does not round it. Each function returns None
where the plain product is to run: on a CPU, in compiled code and dry runs, and where the chooser takes no kernel.

A serving engine first times the forms of 4 bits against each other (`Contest`). The row limits above hold
elsewhere.

A contest times the ways to multiply with codes, once per shape, scheme and number of rows. Some ways read the codes as
stored. Others need their own order, or a copy in 16 bits: a second layout, whose memory is counted. They take part only
where that was asked for. A way that raises, or is wrong compared with sums in fp64, is out. The default way stays
unless another one is clearly faster, so noise does not decide. A contest is held where one is open (open_contest),
before a CUDA graph is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compat import device_seconds, integers
from meshwright.kernels.chooser import simulated_kind, uses_triton
from meshwright.kernels.linear import fp8
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.spec.extras import install

CLASSES = (2, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows that are timed. A product takes the way of the next larger number, and above the last one the default."""
GAIN = 0.95
"""Largest share of the default way's time at which another way replaces it."""
LARGEST_ERROR = 0.02
"""Largest relative error of the result: some roundings to bf16."""
CHECKED = 64
"""Outputs that are compared."""
FUSED_ROWS, E4M3_ROWS = 512, 64
"""Most rows for which decoding the weights anew for each block of rows pays off.

It then costs less than writing and reading them, or, of 8 bits, than reading a copy that was restored once
(benchmarks/quantized_estimate.py).
"""
FEW_ROWS = 2
"""Most rows for which a kernel without tensor cores reads codes of 8 bits (triton/packed_product.py)."""
SLAB_BYTES = 32 * 2**20
"""Size of a restored slab, which must fit in the last-level cache: 40 MiB on an A100, 50 on an H100."""
SLAB_ROWS = 128
"""Rows of the matrix of which slabs are multiples."""
GROUPS = (0, 32, 64, 128, 256)
"""Inputs that may share a scale in the fused product. 0 = all."""


@dataclass(frozen=True, slots=True)
class ProductWay:
    """One way to multiply x (M, K) by a matrix of codes (N, K), transposed."""

    name: str
    missing: Callable[[QuantizedMatrix, torch.dtype], str]
    """Returns why the way cannot run here. Empty = it can."""
    multiply: Callable[[Tensor, QuantizedMatrix, Tensor | None, Any], Tensor]
    """Maps rows, matrix, bias and layout to (M, N)."""
    layout: Callable[[QuantizedMatrix, torch.dtype], tuple[Any, int]] | None = None
    """Makes a second layout of the matrix, and returns it with its bytes. None = codes are read as stored."""


class ClassResult(NamedTuple):
    """Fastest way for at most `rows` rows."""

    rows: int
    way: ProductWay
    seconds: dict[str, float]
    """Time of each way that was right."""
    dropped: dict[str, str]
    """Reason why each other way is out."""


Ready = list[tuple[int, ProductWay, Any]]
"""Ways of a matrix in order of rows: most rows, way, and its layout."""


@dataclass(slots=True)
class ProductContest:
    """Results, and second layouts, for the rest of an engine's life."""

    ways: Sequence[ProductWay]
    rule: Callable[[int], str]
    """Returns the name of the default way for a number of rows."""
    copies: bool
    """Include ways with a second layout."""
    seconds: Callable[[Callable[[], object]], float] = device_seconds
    say: Callable[[str], None] = print
    copied_bytes: int = 0
    """Size of all second layouts."""
    layouts: dict[tuple[Any, ...], tuple[Tensor, Any]] = field(default_factory=dict)
    """Codes and their second layout, by way, dtype and address. Another matrix of the same codes reads it, too.

    The codes are held as long, so no others can get their address.
    """
    results: dict[tuple[Any, ...], list[ClassResult]] = field(default_factory=dict)
    _name: object = field(default_factory=object)
    """Identifies this contest in matrices, which must not hold the contest itself."""
    _filled: list[dict[str, Any]] = field(default_factory=list)
    """`prepared` of the matrices that have ways of this contest."""

    def close(self) -> None:
        """Free all second layouts, including those that matrices hold."""
        for prepared in self._filled:
            if "ways" in prepared and prepared["ways"][0] is self._name:
                del prepared["ways"]
        self._filled.clear()
        self.layouts.clear()

    def product(self, rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor | None:
        """Multiply rows (M, K). Returns (M, N), or None where no way was tried for so many rows."""
        ready = matrix.prepared.get("ways")
        if ready is None or ready[0] is not self._name or ready[1] != rows.dtype:
            # Timing waits for the device, which a capture forbids.
            if rows.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            if ready is None or ready[0] is not self._name:
                self._filled.append(matrix.prepared)
            ready = matrix.prepared["ways"] = self._name, rows.dtype, self._best_ways(matrix, rows.dtype)
        for most, way, layout in ready[2]:
            if len(rows) <= most:
                return way.multiply(rows, matrix, bias, layout)
        return None

    def _best_ways(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Ready:
        key = matrix.codes.device, dtype, matrix.scheme, matrix.size_out, matrix.size_in
        if key not in self.results:
            with torch.no_grad():
                self.results[key] = self._time_ways(matrix, dtype)
            self.say(summary(matrix, dtype, self.results[key]))
        return [(timed.rows, timed.way, self._layout(timed.way, matrix, dtype)) for timed in self.results[key]]

    def _layout(self, way: ProductWay, matrix: QuantizedMatrix, dtype: torch.dtype) -> Any:
        if way.layout is None:
            return None
        key = way.name, dtype, matrix.codes.device, matrix.codes.data_ptr(), matrix.codes.shape
        if key not in self.layouts:
            laid_out, size = way.layout(matrix, dtype)
            self.layouts[key] = matrix.codes, laid_out
            self.copied_bytes += size
        return self.layouts[key][1]

    def _time_ways(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> list[ClassResult]:
        candidates, dropped, layouts = list[ProductWay](), dict[str, str](), dict[str, Any]()
        for way in self.ways:
            reason = "" if self.copies or way.layout is None else "it needs a second layout in memory"
            reason = reason or way.missing(matrix, dtype)
            try:
                if not reason and way.layout is not None:
                    layouts[way.name] = way.layout(matrix, dtype)[0]
            except Exception as failure:  # libraries refuse in many ways
                reason = _first_line(failure)
            if reason:
                dropped[way.name] = reason
            else:
                candidates.append(way)
        # The outputs of every way are compared with sums in fp64 before they are timed.
        _, weight = next(matrix.restored_rows())
        exact_weight = weight[:CHECKED].double()
        results = []
        for rows in CLASSES:
            generator = torch.Generator().manual_seed(rows)
            # Drawn on the host: every device times the same numbers.
            x = torch.randn(rows, matrix.size_in, generator=generator).to(matrix.codes.device, dtype)
            exact = x.double() @ exact_weight.t()
            seconds, out = dict[str, float](), dict(dropped)
            for way in candidates:
                layout = layouts.get(way.name)
                error = _error_of(way, x, matrix, layout, exact)
                if error:
                    out[way.name] = error
                else:
                    seconds[way.name] = self.seconds(partial(way.multiply, x, matrix, None, layout))
            if seconds:
                default, best = self.rule(rows), min(seconds, key=lambda name: seconds[name])
                # Noise must not decide between ways that are about as fast.
                if default in seconds and seconds[best] > GAIN * seconds[default]:
                    best = default
                results.append(ClassResult(rows, next(way for way in candidates if way.name == best), seconds, out))
        return results


def _error_of(way: ProductWay, x: Tensor, matrix: QuantizedMatrix, layout: Any, exact: Tensor) -> str:
    try:
        y = way.multiply(x, matrix, None, layout)[:, :CHECKED].double()
    except Exception as failure:  # compilers, drivers and launches fail in many ways
        return _first_line(failure)
    relative_error = ((y - exact).norm() / exact.norm()).item()
    return "" if relative_error < LARGEST_ERROR else f"off by {relative_error:.2g}"


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__} {(str(failure).splitlines() or [''])[0]}".strip()


def summary(matrix: QuantizedMatrix, dtype: torch.dtype, results: Sequence[ClassResult]) -> str:
    """Describe results in one line: the way of each run of rows with its time at the last of them, and who is out."""
    runs: list[str] = []
    for index, timed in enumerate(results):
        if index + 1 == len(results) or results[index + 1].way is not timed.way:
            microseconds = timed.seconds[timed.way.name] * 1e6
            runs.append(f"{timed.way.name} up to {timed.rows:,} rows ({microseconds:.0f} us)")
    dropped = {name: reason for timed in results for name, reason in timed.dropped.items()}
    absent = "".join(f"; not {name}: {reason}" for name, reason in dropped.items())
    name = str(dtype).removeprefix("torch.")
    return f"products {matrix.size_out:,} x {matrix.size_in:,}, {matrix.scheme.name}, {name}: {', '.join(runs)}{absent}"


def packed(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, converted: dict[Any, Any]) -> Tensor | None:
    """Multiply rows (M, K) by weight-only codes. Returns (M, N), or None where the plain product must run.

    Args:
        converted: Converted rows, shared with other products of the same rows.
    """
    if not len(rows) or matrix.codes.dim() != 2 or matrix.before:
        return None
    if matrix.scheme.activations == "fp8" and _has_fp8_product(rows, matrix):
        return _fp8_product(rows, matrix, bias, converted)
    # A matrix that has ways asks no more: this runs for each product of a step.
    if _contests and matrix.scheme.bits == 4 and ("ways" in matrix.prepared or _is_contested(rows, matrix)):
        product = _contests[-1].product(rows, matrix, bias)
        if product is not None:
            return product
    few = E4M3_ROWS if matrix.scheme.codes == "e4m3" else FUSED_ROWS
    if len(rows) <= few and uses_triton("packed_product", rows, prefer=matrix.prefer, feature=fusion_obstacle(matrix)):
        # Not by `_fused`: each call of Python costs few rows a microsecond.
        from meshwright.kernels.triton import packed_product

        return packed_product.packed_linear(rows, matrix.packed(), bias)
    if matrix.scheme.bits == 4 and matrix.unquantized is None and uses_triton("restore", rows, prefer=matrix.prefer):
        return _by_slabs(rows, matrix, bias)
    return None


_contests: list[ProductContest] = []
"""The open contest, if there is one."""


def open_contest(copies: bool, say: Callable[[str], None]) -> ProductContest:
    """Time products with 4-bit codes from now on, each form at its first call.

    Args:
        copies: Include ways that need a second layout in memory.
        say: Called with a line for each form.
    """
    _contests[:] = [new_contest(copies, say)]
    return _contests[0]


def new_contest(copies: bool, say: Callable[[str], None]) -> ProductContest:
    """Return a contest of all ways. Products do not use it unless it is opened."""
    return ProductContest(WAYS, lambda rows: WAYS[rows > FUSED_ROWS].name, copies=copies, say=say)


def close_contest(contest: ProductContest) -> None:
    """Free the contest's second layouts, and return to the default ways unless another contest is open."""
    contest.close()
    if _contests and _contests[0] is contest:
        _contests.clear()


def _is_contested(rows: Tensor, matrix: QuantizedMatrix) -> bool:
    """Return whether a contest decides: not in compiled code or dry runs, and only where `auto` may choose."""
    plain = matrix.unquantized is None and matrix.outer is None and matrix.keeps_copies
    return plain and matrix.prefer == "auto" and uses_triton("packed_product", rows, feature=fusion_obstacle(matrix))


def _fused(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, _: Any = None) -> Tensor:
    from meshwright.kernels.triton import packed_product

    return packed_product.packed_linear(rows, matrix.packed(), bias)


def _torch_obstacle(matrix: QuantizedMatrix, dtype: torch.dtype) -> str:
    if matrix.scheme.codes != "integer" or dtype != torch.bfloat16:
        return "it takes whole numbers and bf16"
    if matrix.scheme.group not in integers.INT4_GROUPS_OF_GPU:
        return f"it takes no groups of {matrix.scheme.group or matrix.size_in}"
    return integers.gpu_int4_missing(matrix.size_in, matrix.size_out)


def _torch_layout(matrix: QuantizedMatrix, _: torch.dtype) -> tuple[Any, int]:
    scales_and_shifts = matrix.scales_and_shifts()
    packed = integers.pack_gpu_int4(matrix.codes)
    return (packed, scales_and_shifts), packed.nbytes + scales_and_shifts.nbytes


def _by_torch(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
    y = integers.gpu_int4_product(rows.contiguous(), layout[0], matrix.scheme.group, layout[1])
    return y if bias is None else y.add_(bias)


def _gemlite_obstacle(matrix: QuantizedMatrix, _: torch.dtype) -> str:
    if not integers.gemlite_version():
        return f"not installed: {install('gemlite')}"
    if matrix.scheme.codes != "integer" or not matrix.scheme.group:
        return "it takes whole numbers in groups"
    return "" if matrix.size_in % max(32, matrix.scheme.group) == 0 else "it takes whole groups"


def _gemlite_layout(matrix: QuantizedMatrix, dtype: torch.dtype) -> tuple[Any, int]:
    zeros: Tensor | int = 8 if matrix.zeros is None else matrix.every_zero()
    return integers.gemlite_product(matrix.whole_codes(), matrix.scales, zeros, matrix.scheme.group, dtype)


def _by_gemlite(rows: Tensor, _: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
    y: Tensor = layout(rows.contiguous())
    return y if bias is None else y.add_(bias)


def _copy_layout(matrix: QuantizedMatrix, dtype: torch.dtype) -> tuple[Any, int]:
    weight = matrix.restored(dtype)
    return weight, weight.nbytes


def _by_copy(rows: Tensor, _: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
    return F.linear(rows, layout, None if bias is None else bias.to(rows.dtype))


def fusion_obstacle(matrix: QuantizedMatrix) -> str:
    """Return why the fused product cannot take a matrix. Empty = it can."""
    scheme = matrix.scheme
    if scheme.bits != 4 and scheme.codes != "e4m3":
        return f"codes of {scheme.bits} bits are restored"
    if scheme.group not in GROUPS:
        return f"the kernel takes no groups of {scheme.group}"
    return "" if matrix.unquantized is None else "some columns are not quantized"


def _by_slabs(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    from meshwright.kernels.triton import code_words

    packed_matrix = matrix.packed()
    out = torch.empty(len(rows), matrix.size_out, dtype=rows.dtype, device=rows.device)
    step = slab_rows(matrix.size_out, matrix.size_in, rows.dtype.itemsize)
    # One slab's memory for all: it stays in the cache, where a new one would have to be read in.
    scratch = torch.empty(step, matrix.size_in, dtype=rows.dtype, device=rows.device)
    for start in range(0, matrix.size_out, step):
        outputs = slice(start, start + step)
        slab = packed_matrix._replace(
            codes=packed_matrix.codes[outputs],
            scales=packed_matrix.scales[outputs],
            zeros=None if packed_matrix.zeros is None else packed_matrix.zeros[outputs],
        )
        weight = code_words.restore(slab, scratch[: len(slab.codes)])
        if bias is None:
            torch.mm(rows, weight.t(), out=out[:, outputs])
        else:
            torch.addmm(bias[outputs].to(rows.dtype), rows, weight.t(), out=out[:, outputs])
    return out


def slab_rows(outputs: int, inputs: int, itemsize: int) -> int:
    """Return the outputs of a slab. All slabs of a matrix have nearly one size, and restored fit in SLAB_BYTES."""
    count = -(-outputs * inputs * itemsize // SLAB_BYTES)
    return outputs if count <= 1 else -(-outputs // (count * SLAB_ROWS)) * SLAB_ROWS


def takes_int8(rows: Tensor, matrix: QuantizedMatrix) -> bool:
    """Return whether the kernels for 8-bit integers run here."""
    return len(rows) > 0 and uses_triton("int8_product", rows, prefer=matrix.prefer)


def int8(
    rows: Tensor, matrix: QuantizedMatrix, columns: Tensor | None, unquantized: Tensor, bias: Tensor | None, key: Any,
    converted: dict[Any, Any],
) -> Tensor:  # fmt: skip
    """Multiply rows (M, K) by 8-bit codes. Returns (M, N).

    Args:
        columns: Columns (O,) of rows that are multiplied with `unquantized` (N, O). None = none.
        key: Name of these columns in `converted`.
    """
    from meshwright.kernels.triton import int8_product, row_rounding

    if ("int8", key) not in converted:
        converted["int8", key] = row_rounding.rounded(rows, torch.int8, _left_out_marks(matrix, columns))
    parts = (None, None) if columns is None else (columns.int(), unquantized.contiguous())
    operand = int8_product.Int8Matrix(matrix.codes.contiguous(), matrix.scales, *parts)
    return int8_product.int8_linear(rows, converted["int8", key], operand, bias)


def _left_out_marks(matrix: QuantizedMatrix, columns: Tensor | None) -> Tensor | None:
    """Return (K,) uint8 marks: 1 where a column is multiplied separately. Made once for fixed columns."""
    if columns is None:
        return None
    if matrix.columns is not None and "left out" in matrix.prepared:
        fixed_marks: Tensor = matrix.prepared["left out"]
        return fixed_marks
    marks = torch.zeros(matrix.size_in, dtype=torch.uint8, device=columns.device)
    marks[columns.long()] = 1
    if matrix.columns is not None:
        matrix.prepared["left out"] = marks
    return marks


def _has_fp8_product(rows: Tensor, matrix: QuantizedMatrix) -> bool:
    """Return whether torch multiplies fp8 operands of these sizes here, with a scale for each row.

    Its only result dtype is bf16.
    """
    if rows.device.type != "cuda" or simulated_kind() or torch.compiler.is_compiling() or rows.dtype != torch.bfloat16:
        return False
    fits = matrix.size_in % fp8.MULTIPLE == 0 and matrix.size_out % fp8.MULTIPLE == 0
    return fits and not fp8.missing(rows.device)


def _fp8_product(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, converted: dict[Any, Any]) -> Tensor:
    """Round one or two rows as more are rounded, but multiply them as numbers: torch would pad to full tiles."""
    if len(rows) <= FEW_ROWS and uses_triton("packed_product", rows, prefer=matrix.prefer):
        from meshwright.kernels.triton import packed_product, row_rounding

        if "fp8 numbers" not in converted:
            converted["fp8 numbers"] = row_rounding.rounded(rows, rows.dtype)
        numbers = converted["fp8 numbers"]
        return packed_product.few_rows_linear(numbers.codes, matrix.packed(), bias, numbers.scales)
    if "fp8" not in converted:
        converted["fp8"] = fp8.narrow(rows, matrix.prefer)
    weight = fp8.Narrow(matrix.codes, matrix.scales.float())
    return fp8.product(converted["fp8"], weight, rows.dtype, None if bias is None else bias.to(rows.dtype))


WAYS = (
    ProductWay("codes inside", lambda *_: "", _fused),
    ProductWay("restored slabs", lambda *_: "", lambda rows, matrix, bias, _: _by_slabs(rows, matrix, bias)),
    ProductWay("torch's 4-bit product", _torch_obstacle, _by_torch, _torch_layout),
    ProductWay("gemlite", _gemlite_obstacle, _by_gemlite, _gemlite_layout),
    ProductWay("a copy in 16 bits", lambda *_: "", _by_copy, _copy_layout),
)
"""Ways to multiply with 4-bit codes. The default rule uses the first two."""
