"""Serve requests with a tiny random model, and see what the memory of keys and values is used for.

    python examples/serving.py                        # lengths as of a chat: paged blocks against contiguous memory
    python examples/serving.py --record steps.jsonl   # a short story: sharing, preemption, host memory, beams
    meshwright report steps.jsonl                     # ... as an animation

Lengths of the chat are drawn as in ShareGPT (Kwon et al. 2023, arXiv:2309.06180, section 6.2): prompts of 161 tokens on
average, answers of 338. The model's weights are random: what it answers does not matter here, only how long.
"""

import argparse
import random
import tempfile
from pathlib import Path

from meshwright.model import Transformer, build
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.served_request import ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.serving_record import MemoryUse, memory_use, read_record
from meshwright.spec import ModelShape

VOCAB = 64
PROMPT, ANSWER = 161.3, 338.0
"""Mean tokens."""
KWON = {"longest": 0.204, "power_of_two": 0.268, "final": 0.382, "blocks": 0.963}
"""Shares of the memory for keys and values that held tokens, in Figure 2 of that paper."""
WAYS = {
    "longest": "contiguous, the longest request",
    "power_of_two": "contiguous, next power of two",
    "final": "contiguous, final length known",
    "blocks": "blocks",
}


def tiny(positions: int) -> Transformer:
    """One layer of width 16 with one key head."""
    shape = ModelShape(
        vocab=VOCAB, layers=1, hidden=16, heads=2, kv_heads=1, ffn=32, max_positions=positions
    )  # fmt: skip
    return build(shape, seed=0).eval()


def block_bytes(model: Transformer, block: int) -> int:
    """Bytes of a block: a key and a value in fp32 for each position, key head and layer."""
    shape = model.shape
    return block * 2 * shape.kv_heads * shape.head_dim * 4 * shape.layers


def chat_lengths(requests: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    """Draw (prompt, answer) in tokens: exponential, which has about the spread of ShareGPT."""
    chance = random.Random(seed)
    prompts = [min(longest // 2, 1 + int(chance.expovariate(1 / PROMPT))) for _ in range(requests)]
    return [(prompt, min(longest - prompt, 1 + int(chance.expovariate(1 / ANSWER)))) for prompt in prompts]


def chat(path: Path, requests: int = 64, at_once: int = 16, longest: int = 2048, block: int = 16) -> None:
    """Record requests with lengths as of a chat. No two share a prefix."""
    model, chance = tiny(longest), random.Random(1)
    options = EngineOptions(block=block, most_sequences=at_once, longest=longest, record=path)
    engine = ServingEngine(model, options)
    lengths = chat_lengths(requests, longest)
    engine.run([
        engine.add(
            [chance.randrange(VOCAB) for _ in range(prompt)],
            RequestOptions(max_new_tokens=answer, ignore_end=True, salt=None),
        )
        for prompt, answer in lengths
    ])  # fmt: skip


def story(path: Path, block: int = 4) -> None:
    """Record ten requests over 24 blocks and 8 host slots: a shared system prompt, three answers, and beams."""
    model, chance = tiny(128), random.Random(2)
    size = block_bytes(model, block)
    engine = ServingEngine(model, EngineOptions(
        block=block, cache_bytes=24 * size, host_cache_bytes=8 * size, most_sequences=8, most_tokens=40, record=path,
    ))  # fmt: skip
    system = [chance.randrange(VOCAB) for _ in range(3 * block)]

    def add(words: int, answer: int, prefix: list[int] = system, n: int = 1, beams: int = 1) -> None:
        prompt = [*prefix, *(chance.randrange(VOCAB) for _ in range(words))]
        temperature = 0 if beams > 1 else 1
        options = RequestOptions(max_new_tokens=answer, temperature=temperature, ignore_end=True, n=n, beams=beams)
        requests.append(engine.add(prompt, options))

    requests = list[ServedRequest]()
    add(3, 14)
    for _ in range(3):
        engine.step()
    add(5, 20)
    add(2, 12, n=3)
    add(6, 24)
    for _ in range(6):
        engine.step()
    add(9, 22, [])
    add(4, 18)
    add(7, 16, [])
    for _ in range(20):
        engine.step()
    add(3, 10)
    add(1, 10, beams=3)
    engine.run(requests)
    add(3, 6)
    engine.run(requests)


def table(use: MemoryUse) -> str:
    """A row for each way to reserve memory, beside the paper's figure."""
    head = f"{'memory is reserved as':34}{'holds tokens':>14}{'waste':>9}{'Kwon et al.: holds':>20}"
    rows = [
        f"{words:34}{getattr(use, way):14.1%}{1 - getattr(use, way):9.1%}{KWON[way]:20.1%}"
        for way, words in WAYS.items()
    ]
    return "\n".join([head, *rows])


def main() -> None:
    """Print the table, or write the story's record."""
    parser = argparse.ArgumentParser(description="Serve with a tiny random model, and look at its memory.")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the short story's record here")
    parser.add_argument("--block", type=int, default=16, help="positions of a block of the chat")
    parser.add_argument("--requests", type=int, default=64, help="requests of the chat")
    arguments = parser.parse_args()
    if arguments.record is not None:
        if arguments.record.exists():
            parser.error(f"--record {arguments.record} is there already: name another file")
        story(arguments.record)
        print(f"meshwright report {arguments.record}")
        return
    if arguments.block < 1 or arguments.requests < 1:
        parser.error("--block and --requests must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.jsonl"
        chat(path, arguments.requests, block=arguments.block)
        record = read_record(path)
    print(f"{len(record.requests)} requests, {len(record.steps)} steps, blocks of {arguments.block} positions\n")
    print(table(memory_use(record)))


if __name__ == "__main__":
    main()
