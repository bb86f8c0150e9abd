"""Tokens that end an answer, as a tokenizer's chat template writes one."""

from typing import Final

from meshwright.data.chat_prompt import template_of
from meshwright.data.rendering import Policy, conversation
from meshwright.data.samples import Conversation
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.errors import DataError

_ANSWER: Final = "\ufdd2answer\ufdd2"
"""No template's own text holds it, so that it is found where the answer is."""


def turn_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special token that is trained behind an answer; none where the template adds none, or fails."""
    asked = Conversation(messages=({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}))
    try:
        [found] = conversation(asked, template_of(tokenizer), Policy())
    except DataError:  # of a template for other conversations; said where rows are encoded
        return ()
    behind = ""
    for begin, end in found.trained:
        place = found.text.find(_ANSWER, begin, end)
        behind = found.text[place + len(_ANSWER) : end] if place >= 0 else behind
    special = tokenizer.special_ids | {tokenizer.eos}
    return tuple(id for id in tokenizer.encode(behind, special=True).tolist() if id in special)[:1]
