"""`meshwright explore MODEL --cluster NAME`: every layout as one offline HTML page. Needs no torch, no GPU."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import AskedCluster, AskedModel, AskedNodes, AskedRecipe, AskedStack

COUNTING = "explore: computing memory and time of every legal layout, ten seconds to a minute"


def explore(
    model: AskedModel,
    cluster: AskedCluster = None,
    nodes: AskedNodes = None,
    recipe: AskedRecipe = None,
    stack: AskedStack = "",
    price: Annotated[
        float | None, typer.Option(metavar="USD", help="Price of a device-hour. [default: the lowest known list price]")
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="A second cluster or stack on the same page, by what differs: cluster=h200x8,nodes=4,for=torchtitan,"
            "price=2.5.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.html", help="File of the page.")] = Path(
        "explorer.html"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the first layout of each half as one JSON document.")
    ] = False,
) -> None:
    """Write a page with sliders for memory, a map of all legal layouts, and the pipeline schedules."""
    from meshwright.interface.answers.answer import check_page
    from meshwright.interface.terminal.screen_text import explain_wait, print_json, shown_path
    from meshwright.verbs.explore.answer import explore as explored

    check_page(out, "explorer.html")
    with explain_wait(COUNTING):
        answer = explored(model, cluster=cluster, nodes=nodes, recipe=recipe, stack=stack, price=price, beside=beside)
        answer.write(out)
    if json:
        print_json({**answer.to_dict(), "page": str(out)})
        return
    titles = " beside ".join(half.title for half in answer.halves)
    print(f"{shown_path(out)}: {answer.halves[0].plan.model.name} on {titles}; open it in a browser")
