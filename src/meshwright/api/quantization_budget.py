"""`quantize` under a budget of bytes: how large it is in words, and how many bits each matrix is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright.compress.bit_budget import chosen, ladder
from meshwright.compress.sensitivity import measured_groups
from meshwright.compress.stream import predicted_bytes
from meshwright.model import Transformer
from meshwright.model.quantized_formats.folder_format import QuantizedFormat, QuantizedModel
from meshwright.spec.errors import PlanError
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.units import gib
from meshwright.training.batches import Batch

WINDOWS_TOKENS = 4096
"""Of the calibration text, which sensitivities are measured on."""


def within_budget(
    model: QuantizedModel, scheme: Scheme, budget: int, form: QuantizedFormat, before: Callable[[], Transformer],
    batches: Sequence[Batch],
) -> QuantizedModel:  # fmt: skip
    """The model with the schemes of a ladder that its files may have; `before` opens the original. PlanError where even
    the fewest bits are too many, with their bytes, and where the format holds one scheme."""
    rungs = ladder(scheme)

    def of(schemes: Mapping[str, Scheme]) -> QuantizedModel:
        return replace(model, schemes={name: schemes[name] for name in model.schemes})

    first, *others = model.schemes
    why = form.refusal(of({first: rungs[0], **dict.fromkeys(others, rungs[1])}))
    if why:
        raise PlanError(why)
    least = predicted_bytes(form, of(dict.fromkeys(model.schemes, rungs[0])))
    if least > budget:
        raise PlanError(
            f"budget={gib(budget)} is too small: with {rungs[0].bits} bits for every matrix the files take "
            f"{gib(least)}. Give at least that, or a smaller model"
        )
    groups = measured_groups(before(), list(model.schemes), rungs, some_of(batches))
    beside = least - sum(group.choices[0].bytes for group in groups)
    while True:
        numbers = chosen([group.choices for group in groups], budget - beside)
        pairs = zip(groups, numbers, strict=True)
        found = of({name: rungs[number] for group, number in pairs for name in group.names})
        over = predicted_bytes(form, found) - budget
        if over <= 0:
            return found
        beside += over  # of the headers, which differ by some bytes


def some_of(batches: Sequence[Batch]) -> list[Batch]:
    """The first ones that hold WINDOWS_TOKENS together."""
    found: list[Batch] = []
    for batch in batches:
        if sum(one.valid for one in found) >= WINDOWS_TOKENS:
            break
        found.append(batch)
    return found
