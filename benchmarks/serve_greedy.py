"""Greedy answers of the serving engine beside those of `transformers`, for every supported variant and both modes.

    python -m benchmarks.serve_greedy [--json] [--prompts 200]

The models are those of `agreement`: tiny, in fp32, every weight random, so that likeliest tokens change at each place.
Prompts have 1 to 40 tokens, answers 12; transformers answers eight of one length at a time, so that nothing is padded.
Where its own two likeliest tokens are within 1e-4 of the logit, either is right: such answers are counted as ties.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.agreement import loaded
from benchmarks.serve_speed import Load, differences, ours, theirs
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from tests.formats.hub.peers import PEERS, peer

TOGETHER, TOKENS, LONGEST = 8, 12, 40


def prompts(vocab: int, number: int, seed: int) -> Load:
    """In groups of one length."""
    chance, load = random.Random(seed), Load()
    while len(load) < number:
        length = chance.randint(1, LONGEST)
        load += [([chance.randrange(vocab) for _ in range(length)], TOKENS) for _ in range(TOGETHER)]
    return load[:number]


def of_family(name: str, number: int) -> dict[str, Any]:
    """Answers that are wrong, and ties, in both modes."""
    other = peer(name).eval()
    other.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        model = loaded(Path(folder))
    load = prompts(model.shape.vocab, number, seed=sum(map(ord, name)))
    right = theirs(other, load, TOGETHER)
    wrong = ties = 0
    for exact in (False, True):
        engine = ServingEngine(model, EngineOptions(exact=exact, most_tokens=48, most_sequences=16))
        compared = differences(other, load, right, ours(engine, load, salt=0))
        wrong, ties = wrong + compared[0], ties + compared[1]
    different = len({tuple(answer) for answer in right})
    return {"prompts": len(load), "wrong": wrong, "ties": ties, "different_answers": different}


def main() -> None:
    """A line for each family, or one JSON document."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompts", type=int, default=200, help="of a family")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    families = {}
    for name in PEERS:
        families[name] = of_family(name, options.prompts)
        if not options.json:
            print(name, *(f"{value} {key.replace('_', ' ')}" for key, value in families[name].items()), sep="  ")
    if options.json:
        total = {key: sum(family[key] for family in families.values()) for key in ("prompts", "wrong", "ties")}
        print(
            json.dumps(
                {
                    **total,
                    "fewest_prompts": min(family["prompts"] for family in families.values()),
                    "families": families,
                }
            )
        )


if __name__ == "__main__":
    main()
