"""`meshwright plan MODEL --formula`: memory by the formulas of papers."""

from collections.abc import Mapping

from meshwright.spec.errors import ArgumentError, argument


def print_formula(
    model: str, cluster: str | None, layout: list[str] | None, recipe: list[str] | None,
    *, others: Mapping[str, object], json: bool,
) -> None:  # fmt: skip
    """Print memory on paper. `others`: options that it does not read, which are refused."""
    from meshwright.interface.terminal.screen_text import print_answer
    from meshwright.verbs.plan_formula.answer import plan_formula
    from meshwright.verbs.plan_formula.screen import formula_lines

    if unread := next((name for name, setting in others.items() if setting), None):
        with_it = argument("formula", True)
        raise ArgumentError(
            unread, rule=f"is for plans of a layout, and {with_it} counts one device", remedy="leave one out"
        )
    answer = plan_formula(model, cluster=cluster, layout=layout, recipe=recipe)
    print_answer(answer, formula_lines(answer), json=json)
