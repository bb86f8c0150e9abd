"""`meshwright plan MODEL --cluster NAME`: rank layouts, with their cost. Needs no torch, no GPU."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.interface.options import (
    AskedAdapterRank,
    AskedAdapters,
    AskedAdapterTargets,
    AskedCluster,
    AskedConcurrency,
    AskedFramework,
    AskedFrom,
    AskedInput,
    AskedKv,
    AskedMeasure,
    AskedMtbf,
    AskedNodes,
    AskedOutput,
    AskedOutputFolder,
    AskedQuantization,
    AskedRecipe,
    AskedRepair,
    AskedRestart,
    AskedServe,
    AskedStack,
    AskedStorage,
    ModelOrNone,
    refuse_load,
)
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit, PlanError, argument
from meshwright.spec.plan.plan import RANDOM, SAMPLES, STDLIB
from meshwright.verbs.plan_formula.command import print_formula
from meshwright.verbs.plan_from.command import print_config
from meshwright.verbs.plan_serve.command import print_serving

PLANS = (".yaml", ".yml")
MOST_SHOWN = 1000
"""Most alternatives that --top may ask for."""


def plan(
    model: ModelOrNone = None,
    cluster: AskedCluster = None,
    nodes: AskedNodes = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="KEY=N,...",
            help="Fix some: dp=8,tp=2,zero=3,recompute=full; the rest is searched. `plan`: as in PLAN.yaml; "
            "`plan,tp=2`: with that change. A layout as this verb prints it, in quotes, fixes that one.",
        ),
    ] = None,
    recipe: AskedRecipe = None,
    tune: Annotated[
        str,
        typer.Option("--tune", metavar="HOW", help="Fine-tuning: `full`, `lora`, `qlora`, or with a rank `lora:64`."),
    ] = "",
    teacher: Annotated[
        str,
        typer.Option(
            "--teacher", metavar="MODEL", help="Teacher of a distillation: a preset or a folder.", show_default=False
        ),
    ] = "",
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="GPUs per node, as in --cluster h100x8.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Token budget, as 15T: prints days and steps.")
    ] = None,
    price: Annotated[
        float,
        typer.Option(
            "--price",
            metavar="USD",
            help="Dollars per device-hour; with --tokens, prints the total cost.",
            show_default=False,
        ),
    ] = 0.0,
    mtbf: AskedMtbf = None,
    restart: AskedRestart = None,
    repair: AskedRepair = None,
    storage: AskedStorage = None,
    spares: Annotated[
        int | None, typer.Option("--spares", metavar="INT", help="Nodes beyond those that train. [default: 0]")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GIB", help="Memory of each device that a layout may use. [default: all]"),
    ] = None,
    document_tokens: Annotated[
        float,
        typer.Option(
            "--document-tokens",
            metavar="N",
            help="Average length of the packed document around a token. [default: the whole row]",
            show_default=False,
        ),
    ] = 0.0,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the best plan, for train.")] = None,
    stack: AskedStack = "",
    output: AskedOutputFolder = None,
    source: AskedFrom = "",
    details: Annotated[
        bool,
        typer.Option("--details", help="Also print memory and time by part, rejected layouts, and half the machine."),
    ] = False,
    top: Annotated[
        int | None, typer.Option("--top", metavar="INT", help="Number of alternatives to list. [default: 4]")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A,B,...",
            help="A table with a row for each value of a layout's key, `nodes`, `cluster` or `recipe.KEY`: tp=1,2,4,8. "
            "Twice = a grid. What --layout leaves open is searched for each row. "
            "Whole layouts: layout='dp_shard=8; tp=8'.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE.html", help="With --sweep: also write one page, with a curve."),
    ] = None,
    formula: Annotated[
        bool,
        typer.Option("--formula", help="Memory by the formulas of papers, row by row, next to what this engine keeps."),
    ] = False,
    serve: AskedServe = False,
    input_length: AskedInput = None,
    output_length: AskedOutput = None,
    concurrency: AskedConcurrency = None,
    quantization: AskedQuantization = "",
    kv_dtype: AskedKv = "",
    framework: AskedFramework = "",
    adapters: AskedAdapters = None,
    adapter_rank: AskedAdapterRank = None,
    adapter_targets: AskedAdapterTargets = "",
    measure: AskedMeasure = False,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Rank the layouts of a model on a cluster by predicted step time, with memory, traffic, bubble and reasons."""
    cluster = _with_gpus(cluster, gpus)
    # One verb for four questions: a configuration (--from), formulas (--formula), serving (--serve), and training.
    # Options of another question are refused, since ignoring them would mislead.
    failures: dict[str, Any] = {
        "mtbf": mtbf, "restart": restart, "repair": repair, "storage": storage, "spares": spares,
    }  # fmt: skip
    if source:
        from meshwright.verbs.plan_from.answer import plan_from

        _refuse_beside_from({"tune": tune, "teacher": teacher, "tokens": tokens, "price": price, "memory": memory,
                        "document-tokens": document_tokens, "save": save, "top": top, "serve": serve,
                        "out": output, "formula": formula, **failures})  # fmt: skip
        print_config(
            plan_from(
                source, model=model or "", cluster=cluster, nodes=nodes, layout=layout, recipe=recipe, stack=stack
            ),
            details=details, json=json,
        )  # fmt: skip
        return
    if model is None:
        remedy = f"give a preset, a folder or a plan file, or {argument('source', 'FILE')}"
        raise ArgumentError("model", rule="is missing", remedy=remedy)
    if formula:
        print_formula(model, cluster, layout, recipe, json=json, others={
            "nodes": nodes, "tune": tune, "teacher": teacher, "tokens": tokens, "price": price, "memory": memory,
            "save": save, "stack": stack, "out": output, "top": top, "serve": serve, "details": details,
            "document_tokens": document_tokens, "sweep": sweep, "html": html, **failures,
        })  # fmt: skip
        return
    if html is not None and not sweep:
        raise ArgumentError("html", html, f"is for {argument('sweep')}", "leave it out")
    if sweep:
        unused = {"tokens": tokens, "price": price, "save": save, "top": top, "serve": serve, "out": output,
                  "teacher": teacher, **failures}  # fmt: skip
        for name, setting in unused.items():
            if setting:
                raise ArgumentError(name, setting, f"does not go with {argument('sweep')}", "leave one of them out")
        _show_sweep(
            html, json, details, model=model, sweeps=sweep, cluster=cluster, nodes=nodes, layout=layout, recipe=recipe,
            tune=tune, memory=memory, stack=stack, document_tokens=document_tokens,
        )  # fmt: skip
        return
    _check_folder(output, stack)
    load: dict[str, str | int | None] = {
        "input_length": input_length, "output_length": output_length, "concurrency": concurrency,
        "quantization": quantization, "kv_dtype": kv_dtype, "framework": framework,
        "adapters": adapters, "adapter_rank": adapter_rank, "adapter_targets": adapter_targets,
    }  # fmt: skip
    if serve:
        training = {"recipe": recipe, "tune": tune, "teacher": teacher, "tokens": tokens, "price": price,
                    "memory": memory, "document_tokens": document_tokens, "save": save, "for": stack,
                    "out": output, **failures}  # fmt: skip
        print_serving(
            model, cluster, nodes, layout, load, training, details=details, top=top, json=json, measure=measure
        )
        return
    from meshwright.interface.planning.layouts import PlannedLayout
    from meshwright.interface.terminal.screen_text import print_json, show
    from meshwright.planner.search.ranking import LISTED
    from meshwright.verbs.plan.answer import plan as rank_layouts
    from meshwright.verbs.plan.screen import Asked, after_plan
    from meshwright.verbs.plan.screen import answer as in_words
    from meshwright.verbs.plan.screen import unfit as nearest_in_words

    refuse_load({**load, "measure": measure or None})
    if save is not None:
        _check_save(save, model)
    if top is not None and not 1 <= top <= MOST_SHOWN:
        raise ArgumentError("top", top, f"must be at least 1 and at most {MOST_SHOWN}")
    try:
        answer = rank_layouts(
            model, cluster=cluster, nodes=nodes, layout=layout, recipe=recipe, tune=tune, teacher=teacher,
            tokens=tokens, price=price, stack=stack, document_tokens=document_tokens,
            listed=top + 1 if top and json else max(LISTED, (top or 0) + 1), memory=memory, **failures,
        )  # fmt: skip
    except DoesNotFit as error:
        if json and error.document:
            print_json(error.document)
        elif isinstance(error.answer, PlannedLayout):
            nearest = nearest_in_words(error.answer.prediction, details=details)
            show([*nearest, *_device_note(cluster, nodes or 1)])
        raise
    if save:
        answer.save(save)
    written = answer.write(output) if output else []
    if json:
        print_json(answer.to_dict())
        return
    asked = Asked(
        fixed=answer.fixed, tokens=answer.tokens, price=price, details=details, top=top, saved=str(save or ""),
        own_batch=Path(model).suffix not in PLANS and not any("batch" in word for word in recipe or ()),
        stack=answer.software.word if answer.software else "",
        weeks=answer.weeks,
    )  # fmt: skip
    show([*in_words(answer.estimator, answer.ranking, asked), *_device_note(cluster, nodes or 1)])
    if answer.software:
        show(after_plan(answer, written))
    elif save:
        show(["", *_command(answer.plan, save)])


def _show_sweep(html: Path | None, json: bool, details: bool, **arguments: Any) -> None:
    """Print a sweep, and write its page."""
    from meshwright.interface.answers.answer import check_page, write_page
    from meshwright.interface.terminal.screen_text import print_answer
    from meshwright.verbs.commands import option_writer
    from meshwright.verbs.plan.sweep import plan_sweep

    if html is not None:
        check_page(html, "sweep.html", "html")
    answer = plan_sweep(**arguments)
    if html is not None:
        write_page(html, answer.page())
    print_answer(answer, answer.lines(option_writer(["plan"]), details), json=json)
    if html is not None and not json:
        print(f"  Written to {html}")


def _with_gpus(cluster: str | None, gpus: int | None) -> str | None:
    """Return `h100x8` for `--cluster h100 --gpus 8`."""
    from meshwright.spec.presets import machine, split_cluster

    if gpus is None:
        return cluster
    if cluster is not None and (sold := machine(cluster)) is not None:
        if sold.devices != gpus:
            raise ArgumentError(
                "cluster", cluster, f"has {sold.devices} devices", f"leave {argument('gpus')} out, or name the device"
            )
        return cluster
    if cluster is None or split_cluster(cluster)[1] not in (1, gpus):
        raise ArgumentError(
            "gpus",
            gpus,
            f"counts the devices of {argument('cluster')} per node",
            f"name the device, as {argument('cluster', 'h100')}",
        )
    return f"{split_cluster(cluster)[0]}x{gpus}"


def _device_note(cluster: str | None, nodes: int) -> list[str]:
    """Return a caution about a device whose name is ambiguous."""
    from meshwright.interface.terminal.screen_text import width, wrapped
    from meshwright.spec.layout.cluster import names_file
    from meshwright.spec.presets import device_note

    note = "" if cluster is None or names_file(cluster) else device_note(cluster, nodes)
    return list(wrapped(note, width(), "  ! ")) if note else []


def _refuse_beside_from(options: Mapping[str, object]) -> None:
    """Raise PlanError for options that --from cannot use."""
    for name, setting in options.items():
        if setting:
            raise PlanError(f"--from reads a configuration, and --{name} is for plans of a model: leave it out")


def _check_save(save: Path, model: str) -> None:
    """Raise PlanError, before the search, if the plan cannot be saved or would overwrite a user's own file."""
    from meshwright.interface.answers.answer import check_parent

    if save == Path(model):
        raise ArgumentError("save", save, "is the plan that was read", "name another file")
    check_parent(save, "save")
    if save.is_file() and "#" in save.read_text(encoding="utf-8", errors="replace"):
        raise ArgumentError(
            "save", save, "would replace a file with comments, which --save did not write", "name another"
        )


def _command(best: "Plan", file: Path) -> Iterator[str]:
    """Yield the command that runs the saved plan, and the settings that nobody has chosen."""
    from meshwright.interface.terminal.screen_text import continued, width
    from meshwright.store.default_folders import is_open

    cluster, recipe, words = best.cluster, best.recipe, f"train {shlex.quote(str(file))}"
    if best.data.form == SAMPLES:
        words = f"tune {shlex.quote(str(file))}" + " model.init=HF_FOLDER" * (best.init == RANDOM)
        words += " data=CHAT.jsonl" * (best.data.path == STDLIB)
        rate = f"fine-tuning's learning rate ({recipe.learning_rate:g})"
        yield f"Written to {file}, with {rate}; replace the words in capitals."
    else:
        unchanged = f"data ({best.data.title}) and learning rate ({recipe.learning_rate:g})"
        yield f"Written to {file}; {unchanged} are as in the plan."
    if cluster.devices == 1:
        command, where = f"meshwright {words}", ""
    elif cluster.nodes == 1:
        command, where = f"torchrun --nproc_per_node {cluster.devices_per_node} -m meshwright {words}", ""
    else:
        where = f", on each of the {cluster.nodes} nodes, HOST being one of them"
        shared = " resume=auto"
        if is_open(best.run):
            where += " and SHARED_FOLDER a new folder that all see"
            shared = f" run=SHARED_FOLDER{shared}"
        command = (
            f"torchrun --nnodes {cluster.nodes} --nproc_per_node {cluster.devices_per_node} --max_restarts 3 "
            f"--rdzv_backend c10d --rdzv_endpoint HOST:29400 --rdzv_id {shlex.quote(file.stem)} -m meshwright "
            f"{words}{shared}"
        )
    yield f"Command{where}:"
    yield from continued(command, width(), "  ")
    if cluster.nodes > 1:
        yield f"Files for a cluster, which also start it again: meshwright launch {shlex.quote(str(file))} --to slurm"


def _check_folder(folder: Path | None, stack: str) -> None:
    """Raise PlanError, before the search, for an output folder that cannot be written."""
    if folder is None:
        return
    from meshwright.interface.planning.layouts import chosen_software

    if stack in ("", "meshwright"):
        raise PlanError("--out is for --for STACK: take --save FILE for a plan of this package's engine")
    if (software := chosen_software(stack)) and not software.files:
        raise ArgumentError("out", folder, f"is for files, and {stack} has no public ones", "leave it out")
    if folder.is_file():
        raise ArgumentError("out", folder, "is a file", "name a folder")
