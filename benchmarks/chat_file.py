"""A chat file whose conversations are as long as those people have, and a model folder to fine-tune on it.

Turns, prompts and answers have the means of LMSYS-Chat-1M (Zheng et al. 2024, arXiv:2309.11998, table 1: 2.0 turns,
69.5 tokens a prompt, 214.5 an answer). The paper gives no spread: lengths are drawn log-normal with a sigma of 1,
numbers of turns geometric. The words are those of Python's own manual; nothing is downloaded.
"""

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.train_shapes import shape_of
from meshwright.data import Tokenizer
from meshwright.formats.hub import export_folder
from meshwright.model.transformer import build

TURNS, PROMPT, ANSWER = 2.0, 69.5, 214.5
"""Means: turns of a conversation, tokens of a prompt and of an answer."""
SIGMA = 1.0
"""Of the logarithm of a length."""
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Marks answers, as both trainers read them."""


def write_chat(path: Path, conversations: int, seed: int = 0) -> None:
    """`conversations` lines of JSON with a column `messages`."""
    draw, tokenizer = np.random.default_rng(seed), Tokenizer.shipped()
    words = tokenizer.encode(_manual())

    def text(mean: float) -> str:
        length = max(1, round(draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)))
        begin = int(draw.integers(0, max(1, len(words) - length)))
        return tokenizer.decode(words[begin : begin + length])

    with path.open("w", encoding="utf-8") as file:
        for _ in range(conversations):
            messages = []
            for _ in range(draw.geometric(1 / TURNS)):
                messages.append({"role": "user", "content": text(PROMPT)})
                messages.append({"role": "assistant", "content": text(ANSWER)})
            print(json.dumps({"messages": messages}), file=file)


def write_model(folder: Path, shape_name: str) -> None:
    """A Hugging Face folder with random weights of a shape of `train_shapes`, in fp32, and the tokenizer of 2,048
    tokens, which every such shape has room for."""
    shape = shape_of(shape_name)
    export_folder(
        folder,
        model_tensors=build(shape).state_dict().items(),
        shape=shape,
        tokenizer=Tokenizer.shipped(),
        dtype=torch.float32,
        chat_template=TEMPLATE,
    )


def _manual() -> str:
    """Python's manual of its own language, English prose of some 700 kB."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())
