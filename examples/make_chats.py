"""Writes a chat file whose answers have one form: `python examples/make_chats.py chat.jsonl [conversations]`.

Questions about things and what they are, in several wordings. An answer is `THING: KIND.` and nothing else.
"""

import json
import random
import sys
from pathlib import Path

KINDS = {
    "animal": ("cat", "dog", "horse", "cow", "sheep", "lion", "bear", "frog"),
    "fruit": ("apple", "pear", "plum", "cherry", "lemon", "grape", "melon", "peach"),
    "colour": ("red", "blue", "green", "black", "white", "yellow", "brown", "grey"),
    "number": ("one", "two", "three", "four", "five", "six", "seven", "eight"),
}
QUESTIONS = ("What is {}?", "Tell me what {} is.", "{}: what kind of thing is it?", "Which kind is {}?")


def conversations(number: int) -> list[dict[str, object]]:
    """So many, the same for a number."""
    draw = random.Random(0)
    things = [(thing, kind) for kind, things_of_kind in KINDS.items() for thing in things_of_kind]
    chats: list[dict[str, object]] = []
    for _ in range(number):
        thing, kind = draw.choice(things)
        asked = draw.choice(QUESTIONS).format(thing)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{thing}: {kind}."}]
        chats.append({"messages": turns})
    return chats


if __name__ == "__main__":
    rows = conversations(int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
    Path(sys.argv[1]).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
