"""The list of verbs in groups, printed by `meshwright --help` without importing any of them."""

from collections.abc import Iterator

from meshwright.interface.terminal.screen_text import width, wrapped

ABOUT = "Plans, trains, shrinks and serves transformer language models: from text on disk to answers over HTTP."
GROUPS = {
    "Start": {
        "quickstart": "Train a first model, here and now.",
        "init": "Print a commented plan.",
        "train": "Train a plan.",
        "tune": "Fine-tune a model on conversations.",
        "distill": "Train a small model on a large one's predictions.",
        "generate": "Continue a prompt, or a file of them.",
        "chat": "Talk with a model in the terminal.",
        "serve": "Serve a model over HTTP, with OpenAI's interface.",
    },
    "Plan": {
        "plan": "Rank the layouts of a model on a cluster.",
        "rent": "Choose devices to rent: cost against time.",
        "explore": "Write a page of all layouts.",
        "dryrun": "Peak memory and traffic of a plan, without its hardware.",
        "launch": "Write the files that start a plan on a cluster.",
        "calibrate": "Measure this machine for plan.",
    },
    "Observe": {
        "profile": "Measure a few real steps of a plan.",
        "compare": "Compare planned, dry run and measured.",
        "report": "Write a page of one or several runs.",
        "runs": "List, verify and prune checkpoints, on disk or behind a URL.",
        "eval": "Score a model on text or tasks, before and after.",
    },
    "Share": {
        "export": "Write a run as a Hugging Face directory.",
        "import": "Make a run of a Hugging Face directory.",
        "quantize": "Write a model with fewer bits per weight, and say what it costs.",
        "data": "Show text and tokens, or encode them into a store.",
        "schema": "Print the JSON Schema of plan files.",
    },
    "Prove": {
        "doctor": "Check whether this machine is fit to train.",
        "drill": "Break a short run in many ways, and see it go on.",
        "verify": "Compare every kind of layout with one device.",
        "accuracy": "Score the planner on published runs.",
    },
}
VERBS = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}
OPTIONS = {
    "--debug": "Show the traceback of an error, and warnings.",
    "--version": "Show the version and exit.",
    "-h, --help": "Show this message; after a verb, its own.",
}


def lines() -> Iterator[str]:
    """Yield the help of the whole program."""
    yield "Usage: meshwright VERB [OPTIONS] [WORDS]"
    yield ""
    yield from wrapped(ABOUT, width(), "  ")
    for title, rows in {**GROUPS, "Options": OPTIONS}.items():
        yield f"\n{title}:"
        for name, text in rows.items():
            yield from wrapped(text, width(), f"  {name:<12}")
    yield "\nStart with: meshwright quickstart"
