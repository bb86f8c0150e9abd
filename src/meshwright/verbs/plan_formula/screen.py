"""Answer of `plan --formula` on the terminal: a layer row by row, all layers by policy, parameters, states."""

from collections.abc import Iterator

from meshwright.interface.terminal.screen_text import dot, width, wrapped
from meshwright.spec.units import GIB, short_gib, text_size
from meshwright.verbs.plan_formula.answer import FormulaAnswer


def formula_lines(answer: FormulaAnswer) -> Iterator[str]:
    """Yield all lines."""
    plan = answer.plan
    shape, recipe, b = plan.model, plan.recipe, plan.layout.micro_batch
    paper, engine = answer.layer_bytes
    parts = (
        f"{shape.name}: a layer keeps {_size(paper)} on paper and {_size(engine)} here",
        f"{plan.cluster.device.name}, {recipe.precision}, kernels={plan.layout.kernels}",
        f"s={recipe.sequence:,} b={b} h={shape.hidden:,} a={shape.heads} L={shape.layers} v={shape.vocab:,}",
    )
    yield from wrapped(dot().join(parts), width(), "", "  ")
    yield ""
    yield f"  {'one layer keeps':<34}{'formula':<13}{'on paper':>12}{'here':>12}"
    part = ""
    for row in answer.layer:
        if row.part != part:
            part = row.part
            yield f"  {part}"
        sizes = f"{_size(row.paper_bytes):>12}{_size(row.engine_bytes):>12}"
        yield f"    {row.operation:<32}{row.formula:<13}{sizes}"
        if row.why != "the same":
            yield from wrapped(row.why, width(), "        ")
    yield f"  {'sum: 34 s b h + 5 a s^2 b':<47}{_size(paper):>12}{_size(engine):>12}"
    yield ""
    yield f"  {f'all {shape.layers} layers, recompute=':<47}{'on paper':>12}{'here':>12}"
    for policy, (on_paper, here) in answer.policies.items():
        yield f"    {policy:<45}{_size(on_paper):>12}{_size(here):>12}"
    yield ""
    yield f"  {'parameters':<34}{'formula':<22}{'count':>15}"
    for component in answer.components:
        yield f"    {component.component:<32}{component.formula or '-':<18}{component.count:>19,}"
    is_gpt = any(row.formula for row in answer.components)
    learned = any(row.component == "positions" for row in answer.components)
    total = f"N = h v + L (12 h^2 + 13 h) + 2 h{', and positions' * learned}" if is_gpt else "N"
    yield f"  {total:<52}{answer.parameters:>19,}"
    yield ""
    for precision, each in answer.states.items():
        terms = " + ".join(f"{size // answer.parameters} ({name})" for name, size in each.items() if size)
        yield from wrapped(
            f"States in {precision}: {terms} = 16 bytes per parameter = {_size(sum(each.values()))}.", width(),
            "  ", "    ",
        )  # fmt: skip
    yield from wrapped(
        "A gradient in bf16 is 4 bytes here once it is a sum of micro-batches or ranks: 18 bytes per parameter.",
        width(), "  ", "    ",
    )  # fmt: skip


def _size(num_bytes: int) -> str:
    """Return bytes in GiB from one on, and "-" for none."""
    return "-" if not num_bytes else short_gib(num_bytes) if num_bytes >= GIB else text_size(num_bytes)
