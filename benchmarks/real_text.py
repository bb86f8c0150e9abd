"""Runs on texts people know: tiny Shakespeare and WikiText-2, from a folder that is not part of the repository.

    python -m benchmarks.real_text [FOLDER] [--json] [KEY=VALUE ...]

FOLDER holds tinyshakespeare.txt, wikitext-2-valid.txt and wikitext-2-test.txt; without it the environment variable
MESHWRIGHT_TEXT, then ../shared/text beside the checkout. Shakespeare is split 9 to 1 in the order of the text. Of
WikiText-2 the validation file is trained on and the test file scored: a quarter of a million words, not the two
million of its training file, so the figures stand beside no published ones. The model is quickstart's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BESIDE = Path(__file__).resolve().parent.parent.parent / "shared" / "text"
RECIPE = (
    "model=llama-tiny",
    "data.tokenizer=bpe:2048",
    "model.layers=4",
    "model.hidden=128",
    "model.heads=4",
    "model.ffn=384",
    "recipe.steps=300",
    "recipe.sequence=256",
    "recipe.global_batch=16",
    "recipe.learning_rate=4e-3",
    "recipe.learning_rate_schedule=wsd",
    "recipe.checkpoint_every=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text: what is trained on, what is scored (empty = the part held out), and how a sample begins."""

    train: str
    test: str = ""
    validation: float
    prompt: str


TEXTS = {
    "tinyshakespeare": Text(train="tinyshakespeare.txt", validation=0.1, prompt="ROMEO:\n"),
    "wikitext-2": Text(train="wikitext-2-valid.txt", test="wikitext-2-test.txt", validation=0.02, prompt=" The "),
}


def find(given: Path | None) -> Path | str:
    """The folder, or a sentence that says why there is none."""
    folder = given or Path(os.environ.get("MESHWRIGHT_TEXT") or BESIDE)
    wanted = [name for text in TEXTS.values() for name in (text.train, text.test) if name]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        return f"no {missing[0]}: give a folder that holds it, or set MESHWRIGHT_TEXT"
    return folder.resolve()


def measure(text: Text, folder: Path, overrides: list[str], place: Path) -> dict[str, Any]:
    """Train, score, sample."""
    run = str(place / "run")
    settings = [*RECIPE, f"data.path={folder / text.train}", f"data.validation={text.validation}", f"run={run}"]
    summary = meshwright(place, "train", *settings, *overrides)
    scored = meshwright(place, "eval", run, *(["--data", str(folder / text.test)] if text.test else []))
    sample = meshwright(place, "generate", run, "--prompt", text.prompt, "--top-p", "0.9", "--max-new-tokens", "120")
    return {
        "bits_per_byte": scored["bits_per_byte"],
        "perplexity": scored["perplexity"],
        "scored_tokens": scored["tokens"],
        "train_loss": summary["loss"],
        "tokens": summary["tokens"],
        "seconds": summary["seconds"],
        "tokens_per_second": summary["tokens_per_second"],
        "sample": text.prompt + sample["text"],
    }


def meshwright(place: Path, *words: str) -> dict[str, Any]:
    """One verb with --json, its document; its own cache, so that tokens are made anew."""
    command = [sys.executable, "-m", "meshwright", *words, "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    finished = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"meshwright {words[0]} failed: {finished.stderr.strip()}")
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def main() -> None:
    """Print the figures, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*", metavar="[FOLDER] [KEY=VALUE]")
    options = parser.parse_args()
    folders = [Path(word) for word in options.words if "=" not in word]
    folder = find(folders[0] if folders else None)
    if isinstance(folder, str):
        print(json.dumps({"skipped": folder}) if options.json else folder)
        return
    overrides = [word for word in options.words if "=" in word]
    results = {}
    for name, text in TEXTS.items():
        with tempfile.TemporaryDirectory() as place:
            results[name] = measure(text, folder, overrides, Path(place))
        if not options.json:
            show(name, results[name])
    if options.json:
        print(json.dumps(results, indent=1))


def show(name: str, found: dict[str, Any]) -> None:
    """For people."""
    print(f"{name}: {found['bits_per_byte']:.3f} bits per byte, perplexity {found['perplexity']:.1f} a token")
    print(f"  {found['tokens']:,} tokens in {found['seconds']:.0f} s, {found['tokens_per_second']:.0f} tokens/s")
    print("  | " + found["sample"].replace("\n", "\n  | "))


if __name__ == "__main__":
    main()
