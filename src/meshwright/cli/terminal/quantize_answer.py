"""What `quantize` prints: how good the smaller model is, its size, and the layers that moved most."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.cli.terminal.screen_text import coloured, folded, plus_minus
from meshwright.spec.gguf_schemes import GGUF, GGUF_SCHEMES
from meshwright.spec.quantization_schemes import SCHEMES
from meshwright.spec.units import many

if TYPE_CHECKING:
    from meshwright.api.quantizing import QuantizeAnswer


def answer(found: "QuantizeAnswer") -> Iterator[str]:
    """All lines."""
    word, colour = ("OK", "green") if found.passed else ("TOO FAR", "red")
    if found.quality is None:
        word, colour = "WRITTEN", "yellow"
    yield f"{coloured(word, colour)}  {found.headline}"
    yield from folded(_details(found))


def _details(found: "QuantizeAnswer") -> Iterator[str]:
    matrices = many(len(found.layers), "matrix", "matrices")
    place = "file  " if found.format == GGUF else "folder"
    yield f"{place}      {found.run} ({found.format}), {matrices} of {found.original}"
    if found.format == "meshwright":
        others = " or ".join(found.other_formats)
        what = f"--format {others} is for other software" if others else "no other format holds this"
        yield f"readers     meshwright alone; {what}"
    bits = 8 * sum(one.bytes for one in found.layers) / found.quantized_parameters
    same = "as predicted" if found.bytes == found.predicted_bytes else f"predicted {found.predicted_bytes:,}"
    yield f"size        {found.bytes:,} bytes, {same}; {bits:.3g} bits per quantized weight"
    left = "norms, biases, routers" if found.format == GGUF else "embeddings, head, norms, biases, routers"
    yield f"left alone  {', '.join((left, *found.skipped))}"
    if found.note:
        yield f"tokenizer   {found.note}"
    if found.format == GGUF:
        types = Counter(one.scheme for one in found.layers).most_common()
        each = ", ".join(f"{kind} for {many(number, 'matrix', 'matrices')}" for kind, number in types)
        yield f"types       {each}"
    if found.outlier_share:
        yield f"outliers    {100 * found.outlier_share:.2f}% of inputs stay in 16 bit"
    elif found.scheme == "llm-int8":
        yield "outliers    no column was kept in 16 bit beforehand"
    if found.budget_bytes is not None:
        each = ", ".join(f"{bits} bits for {many(number, 'matrix', 'matrices')}" for bits, number in found.bits.items())
        yield f"budget      {found.budget_bytes:,} bytes: {each}"
    if found.calibration_tokens:
        done = f"; {many(found.resumed_blocks, 'block')} from before" if found.resumed_blocks else ""
        yield f"calibrated  on {found.calibration_tokens:,} tokens of {found.calibration_text}{done}"
    rare = [one for one in found.layers if one.uncalibrated]
    if rare:
        experts = f"{many(rare[0].uncalibrated, 'expert')} of {rare[0].name}"
        more = f" and of {len(rare) - 1} more stacks" if len(rare) > 1 else ""
        yield f"rounded to nearest  {experts}{more}, which the text hardly reached: give more of it"
    if found.quality is None:
        return
    one = found.quality
    low, high = (SCHEMES if found.scheme in SCHEMES else GGUF_SCHEMES)[found.scheme].expected_kl
    usual = "" if low <= one.kl <= high else f"; usual for {found.scheme}: {low:g} to {high:g}"
    error = plus_minus(f"{one.kl:.4g} ± {one.kl_error:.2g}")
    yield f"KL          {error} nats per token, limit {found.max_kl:g}; 99% of tokens below {one.kl_p99:.3g}{usual}"
    yield f"measured on {one.tokens:,} tokens of held-out text"
    yield "moved most  output error per layer"
    for layer in found.blamed:
        yield f"    {layer.output_error:.2e}  {layer.name}"
