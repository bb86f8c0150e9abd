"""Options that several verbs take: a trained model and how it samples, a plan, and a served load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.spec.errors import ArgumentError, PlanError

DEFAULT_TEMPERATURE = 0.8

ModelPath = Annotated[
    Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="Run folder, Hugging Face directory or .gguf file.")
]
Checkpoint = Annotated[
    str, typer.Option(metavar="WHICH", help="Checkpoint of a run: last, best by held-out loss, or a step.")
]
ServedDtype = Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, as stored on a GPU.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature: above 1 bolder, below 1 safer.  [default: 0.8]")
]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens only; 0 = all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that together reach p only.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]
Adapter = Annotated[
    Path | None, typer.Option(metavar="DIR", help="LoRA adapter to apply: a PEFT folder, or a run with model.lora.")
]
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
AskedMtbf = Annotated[
    float | None, typer.Option(metavar="HOURS", help="Hours of a device between failures. [default: 50677, Llama 3's]")
]
AskedRestart = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Seconds from a failure to the next step. [default: 180]")
]
AskedRepair = Annotated[
    float | None, typer.Option(metavar="HOURS", help="Hours until a failed node is back. [default: 24]")
]
AskedStorage = Annotated[
    float | None, typer.Option(metavar="GB/s", help="Write speed of each node, for checkpoints. [default: 2]")
]
AskedCluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.toml",
        help="Device and number per node: h100x8; a machine: p5.48xlarge; or a file of calibrate.",
    ),
]
RunCluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.toml", help="Cluster of the planned column, as for plan. [default: that of the plan]"
    ),
]
AskedNodes = Annotated[int | None, typer.Option(help="Nodes of the cluster.")]
AskedRecipe = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE,...", help="sequence=8192,global_batch=1024,precision=bf16 ...")
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
        "deepspeed, trl, axolotl, nanotron, nemo, maxtext; hai-llm (DeepSeek-V3's).",
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
AskedServe = Annotated[
    bool, typer.Option("--serve", help="Plan serving instead of training: memory, concurrency, tokens per second.")
]


def _for_serving(metavar: str, help: str) -> Any:
    """Return an option that goes with --serve. Its help names the default, which depends on the verb."""
    return typer.Option(metavar=metavar, help=f"With --serve: {help}", show_default=False)


AskedQuantization = Annotated[
    str,
    _for_serving("NAME", "weights as bf16, fp8, nvfp4, int4_wo, or a scheme of quantize. [default: bf16]"),
]
AskedKv = Annotated[str, _for_serving("NAME", "keys and values as bf16, fp8, int8 or fp32. [default: bf16]")]
AskedFramework = Annotated[str, _for_serving("NAME", "vllm, sglang, trtllm or meshwright. [default: vllm]")]
AskedAdapters = Annotated[int | None, _for_serving("INT", "LoRA adapters on top of the model. [default: 0]")]
AskedAdapterRank = Annotated[
    int | None, typer.Option(metavar="INT", help="With --adapters: rank of each. [default: 16]")
]
AskedAdapterTargets = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="With --adapters: matrices, as model.lora.targets. [default: all]",
        show_default=False,
    ),
]  # fmt: skip
AskedMeasure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="With --serve and a file of calibrate: also run the load here, and print planned, dry run and measured.",
    ),
]
AskedInput = Annotated[int | None, _for_serving("INT", "tokens of a prompt. [default: 1024]")]
AskedOutput = Annotated[int | None, _for_serving("INT", "tokens of an answer. [default: 1024]")]
AskedConcurrency = Annotated[int | None, _for_serving("INT", "requests in flight. [default: 64]")]
# compare serves the load on this machine, where a smaller one takes long enough.
ServedInput = Annotated[int | None, _for_serving("INT", "tokens of a prompt. [default: 256]")]
ServedOutput = Annotated[int | None, _for_serving("INT", "tokens of an answer. [default: 64]")]
ServedConcurrency = Annotated[int | None, _for_serving("INT", "requests in flight. [default: 8]")]


def check_adapter(adapter: Path | None) -> None:
    """Raise ArgumentError unless the folder exists."""
    if adapter is not None and not adapter.is_dir():
        raise ArgumentError(
            "adapter",
            adapter,
            "does not exist",
            "give a folder of PEFT or of `meshwright export --adapter`, or a run with model.lora",
        )


def named_adapters(words: Sequence[str] | None, model: str) -> dict[str, Path]:
    """Return {name: folder} of NAME=DIR words.

    Raises ArgumentError for a malformed word, a missing folder, or a name that is taken, as `model` is.
    """
    folders: dict[str, Path] = {}
    for word in words or ():
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ArgumentError("adapter", word, "must be NAME=DIR", "the name that requests use, and a folder")
        if name in folders or name == model:
            raise ArgumentError("adapter", word, remedy=f"the name {name} is taken; give each adapter its own")
        if not Path(folder).is_dir():
            raise ArgumentError("adapter", word, "does not exist", "give NAME=FOLDER")
        folders[name] = Path(folder)
    return folders


def chosen_temperature(greedy: bool, temperature: float | None) -> float:
    """Return the temperature that --greedy and --temperature ask for.

    Raises PlanError when they contradict each other.
    """
    if greedy and temperature:
        raise PlanError(f"--greedy and --temperature {temperature} contradict each other: give one")
    return 0.0 if greedy else DEFAULT_TEMPERATURE if temperature is None else temperature


def refuse_load(load: Mapping[str, str | int | None]) -> None:
    """Raise PlanError for options of a load without --serve."""
    option = next((name for name, setting in load.items() if setting not in ("", None)), None)
    if option:
        raise PlanError(f"--{option.replace('_', '-')} is for serving: add --serve")
