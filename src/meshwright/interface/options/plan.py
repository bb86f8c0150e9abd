"""A plan on the command line: a file with changes, or model, cluster and recipe."""

from pathlib import Path
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

AskedStack = Annotated[
    str,
    typer.Option(
        "--for", metavar="STACK", show_default=False,
        help="Search layouts of this training software: torchtitan, megatron-lm, accelerate, "
        "deepspeed, trl, axolotl, nanotron, nemo, maxtext.",
    ),
]  # fmt: skip

AskedFrom = Annotated[
    str,
    typer.Option(
        "--from", metavar="FILE|FOLDER", show_default=False,
        help="Read a configuration of such software: does it fit, what makes it fit, what is faster.",
    ),
]  # fmt: skip

AskedOutputFolder = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", "--output", metavar="FOLDER", help="With --for: folder for its configuration and launch scripts."
    ),
]
