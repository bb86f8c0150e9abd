"""The words after a verb that takes a plan: a plan file, and changes to it."""

from typing import Annotated

import typer

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="PLAN.yaml|KEY=VALUE", help="A plan file, and changes to it.", show_default=False),
]
