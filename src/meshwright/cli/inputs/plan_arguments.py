"""A plan on the command line: a file with changes, or model, cluster and recipe."""

from typing import Annotated

import typer

AskedModel = Annotated[
    str,
    typer.Argument(metavar="MODEL|PLAN.yaml", help="A preset, a Hugging Face folder or config.json, or a plan file."),
]
ModelOrNone = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|PLAN.yaml",
        help="A preset, a Hugging Face folder or config.json, or a plan file; not needed with --from.",
        show_default=False,
    ),
]
AskedCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE.toml",
        help="Device and number per node: h100x8; a machine: p5.48xlarge; or a file of calibrate.",
    ),
]
RunCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE.toml",
        help="Cluster of the planned column, as for plan. [default: that of the plan]",
    ),
]
AskedNodes = Annotated[int | None, typer.Option("--nodes", help="Nodes of the cluster.")]
AskedRecipe = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="KEY=VALUE,...", help="sequence=8192,global_batch=1024,precision=bf16 ..."),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="PLAN.yaml|KEY=VALUE", help="A plan file, and changes to it.", show_default=False),
]
