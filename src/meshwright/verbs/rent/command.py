"""`meshwright rent MODEL --tokens N`: devices to rent, how many, for how long. Needs no torch, no GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.interface import options
from meshwright.spec.errors import ArgumentError, argument

SEARCHING = "rent: searching the layouts of every device and number of nodes, about ten seconds"


def rent(
    model: options.AskedModel,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens of the run, as 1T.")] = None,
    dataset_size: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of the data, with --epochs in place of --tokens.")
    ] = None,
    epochs: Annotated[float, typer.Option(metavar="NUMBER", help="Passes over --dataset-size.")] = 1.0,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="Longest time, as 30d, 2w, 12h, 90min.")] = None,
    budget: Annotated[float | None, typer.Option(metavar="USD", help="Most dollars.")] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Your prices: columns device, usd_per_gpu_hour, nodes ...")
    ] = None,
    devices: Annotated[
        list[str] | None, typer.Option(metavar="NAME,...", help="Try only these. [default: all with a price]")
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(metavar="N,...", help="Try only these numbers of nodes. [default: powers of 2 to 256]"),
    ] = None,
    tune: Annotated[
        str, typer.Option(metavar="HOW", help="Fine-tuning: `full`, `lora`, `qlora`, or with a rank `lora:64`.")
    ] = "",
    recipe: options.AskedRecipe = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the second search, over all layouts of plan, for rows of the front.")
    ] = False,
    mtbf: options.AskedMtbf = None,
    restart: options.AskedRestart = None,
    repair: options.AskedRepair = None,
    storage: options.AskedStorage = None,
    evaluation: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Evaluation time over step time. [default: 0.01]")
    ] = None,
    spares: Annotated[
        int | None, typer.Option(metavar="INT", help="Spare nodes. [default: the cheapest number]")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Rent for serving instead of training.")] = False,
    latency: Annotated[
        float | None, typer.Option(metavar="MS", help="With --serve: most time per token after the first.")
    ] = None,
    input_length: options.AskedInput = None,
    output_length: options.AskedOutput = None,
    concurrency: options.AskedConcurrency = None,
    quantization: options.AskedQuantization = "",
    kv_dtype: options.AskedKv = "",
    framework: options.AskedFramework = "",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write one page, for a browser offline.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print every row of the front, and the devices without a price.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Weigh cost against time of a run over all devices with a price: which to rent, how many, with which layout."""
    training: dict[str, Any] = {
        "tokens": tokens, "dataset_size": dataset_size, "epochs": epochs if epochs != 1 else None,
        "deadline": deadline, "budget": budget, "tune": tune, "recipe": recipe, "quick": quick, "mtbf": mtbf,
        "restart": restart, "repair": repair, "storage": storage, "evaluation": evaluation, "spares": spares,
    }  # fmt: skip
    serving: dict[str, Any] = {
        "latency": latency, "input_length": input_length, "output_length": output_length, "concurrency": concurrency,
        "quantization": quantization, "kv_dtype": kv_dtype, "framework": framework,
    }  # fmt: skip
    # Options of the other question are refused, since ignoring them would mislead.
    own_options, foreign_options = (serving, training) if serve else (training, serving)
    option = next((name for name, setting in foreign_options.items() if _is_set(setting)), None)
    if option:
        switch = argument("serve", True)
        rule, remedy = ("training", f"leave out {switch}") if serve else ("serving", f"add {switch}")
        raise ArgumentError(option, rule=f"is for {rule}", remedy=remedy)
    asked = {name: setting for name, setting in own_options.items() if _is_set(setting)}
    asked |= {"prices": prices, "devices": _names(devices, "devices", "h100,mi300x"), "nodes": _numbers(nodes)}
    from meshwright.interface.answers.answer import check_page, write_page
    from meshwright.interface.terminal.screen_text import explain_wait, print_json, show
    from meshwright.planner.rent.page import page
    from meshwright.verbs.rent.answer import RentAnswer, ServeRentAnswer, rent_serving
    from meshwright.verbs.rent.answer import rent as rent_training
    from meshwright.verbs.rent.screen import rent_answer, serve_rent_answer

    if html is not None:
        check_page(html, "rent.html", "html")
    answer: RentAnswer | ServeRentAnswer
    with explain_wait(SEARCHING):
        if serve:
            answer = rent_serving(model, **asked)
            lines = serve_rent_answer(answer, every=every)
        else:
            answer = rent_training(model, **asked)
            lines = rent_answer(answer, every=every)
    # The page and the JSON print one document, so they cannot disagree.
    document = answer.to_dict()
    if html is not None:
        write_page(html, page(document))
    if json:
        print_json(document)
    else:
        show(lines)
        if html is not None:
            print(f"\n  {html}: open it in a browser")
    answer.check()


def _is_set(value: object) -> bool:
    """Return if an option was given. 0 is a value."""
    return value is not None and value is not False and value != "" and value != []


def _names(words: list[str] | None, key: str, example: str) -> list[str] | None:
    """Split words like `a,b` at commas. Raises ArgumentError for commas alone."""
    names = [name for word in words for name in word.split(",") if name.strip()] if words else None
    if names == []:
        raise ArgumentError(
            key, ",".join(words or ()), "is empty", f"list names with commas, as {argument(key, example)}"
        )
    return names


def _numbers(words: list[str] | None) -> list[int] | None:
    names = _names(words, "nodes", "1,2,4")
    for name in names or ():
        if not name.strip().isdecimal():
            raise ArgumentError("nodes", name, "must be whole numbers, as 1,2,4")
    return [int(name) for name in names] if names else None
