"""Answer of `quantize` on the terminal: quality of the smaller model, its size, and the layers that moved most."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.interface.terminal.screen_text import coloured, folded, plus_minus
from meshwright.spec.model.quantization_schemes import SCHEMES, keeps_outliers
from meshwright.spec.units import many
from meshwright.spec.weights.gguf_schemes import GGUF, GGUF_SCHEMES

if TYPE_CHECKING:
    from meshwright.verbs.quantize.answer import QuantizeAnswer


def lines(answer: "QuantizeAnswer") -> Iterator[str]:
    """Yield all lines."""
    word, colour = ("OK", "green") if answer.passed else ("TOO FAR", "red")
    if answer.quality is None:
        word, colour = "WRITTEN", "yellow"
    yield f"{coloured(word, colour)}  {answer.headline}"
    yield from folded(_details(answer))


def _details(answer: "QuantizeAnswer") -> Iterator[str]:
    matrices = many(len(answer.layers), "matrix", "matrices")
    kind = "file  " if answer.format == GGUF else "folder"
    yield f"{kind}      {answer.run} ({answer.format}), {matrices} of {answer.original}"
    if answer.format == "meshwright":
        others = " or ".join(answer.other_formats)
        what = f"--format {others} is for other software" if others else "no other format holds this"
        yield f"readers     meshwright alone; {what}"
    bits = 8 * sum(layer.bytes for layer in answer.layers) / answer.quantized_parameters
    same = "as predicted" if answer.bytes == answer.predicted_bytes else f"predicted {answer.predicted_bytes:,}"
    yield f"size        {answer.bytes:,} bytes, {same}; {bits:.3g} bits per quantized weight"
    unquantized = "norms, biases, routers" if answer.format == GGUF else "embeddings, head, norms, biases, routers"
    yield f"left alone  {', '.join((unquantized, *answer.skipped))}"
    if answer.note:
        yield f"tokenizer   {answer.note}"
    if answer.format == GGUF:
        types = Counter(layer.scheme for layer in answer.layers).most_common()
        matrices_by_kind = ", ".join(f"{scheme} for {many(number, 'matrix', 'matrices')}" for scheme, number in types)
        yield f"types       {matrices_by_kind}"
    if answer.outlier_share:
        yield f"outliers    {100 * answer.outlier_share:.2f}% of inputs stay in 16 bit"
    elif keeps_outliers(answer.scheme):
        yield "outliers    no column was kept in 16 bit beforehand"
    if answer.budget_bytes is not None:
        matrices_by_kind = ", ".join(
            f"{bits} bits for {many(number, 'matrix', 'matrices')}" for bits, number in answer.bits.items()
        )
        yield f"budget      {answer.budget_bytes:,} bytes: {matrices_by_kind}"
    if answer.calibration_tokens:
        done = f"; {many(answer.resumed_blocks, 'block')} from before" if answer.resumed_blocks else ""
        yield f"calibrated  on {answer.calibration_tokens:,} tokens of {answer.calibration_text}{done}"
    rare = [layer for layer in answer.layers if layer.uncalibrated]
    if rare:
        experts = f"{many(rare[0].uncalibrated, 'expert')} of {rare[0].name}"
        more = f" and of {len(rare) - 1} more stacks" if len(rare) > 1 else ""
        yield f"rounded to nearest  {experts}{more}, which the text hardly reached: give more of it"
    if answer.quality is None:
        return
    quality = answer.quality
    low, high = (SCHEMES if answer.scheme in SCHEMES else GGUF_SCHEMES)[answer.scheme].expected_kl
    # Outside the usual range something may be wrong with the text or the model, even within the limit.
    usual = "" if low <= quality.kl <= high else f"; usual for {answer.scheme}: {low:g} to {high:g}"
    error = plus_minus(f"{quality.kl:.4g} ± {quality.kl_error:.2g}")
    limit = f"limit {answer.max_kl:g}; 99% of tokens below {quality.kl_p99:.3g}{usual}"
    yield f"KL          {error} nats per token, {limit}"
    yield f"measured on {quality.tokens:,} tokens of held-out text"
    yield "moved most  output error per layer"
    for layer in answer.blamed:
        yield f"    {layer.output_error:.2e}  {layer.name}"
