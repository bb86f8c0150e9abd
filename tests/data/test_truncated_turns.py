"""Conversations that are longer than a row: cut in the middle of any turn, what stays is trained as in the whole."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.data.sequences.windows import IGNORED
from meshwright.data.tokens.tokenizer import Tokenizer
from tests.data.chats_for_tests import CHATML, LLAMA3, conversations, tokenizer_json
from tests.data.test_chat_template import theirs
from tests.data.test_sample_encoder import only, tokenized
from tests.data.test_sample_rows import raw, rows

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}


def longest_whole(pieces: list[bytes], most: int) -> int:
    """Return how many of the first `most` tokens end with a whole character, by Python's own decoder."""
    for length in range(most, 0, -1):
        try:
            b"".join(pieces[:length]).decode()
        except UnicodeDecodeError:
            continue
        return length
    return 0


@pytest.mark.parametrize("tokenizer", ["gpt2", "qwen2"])
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(messages=conversations(answered=True), sequence=st.integers(2, 60))
@pytest.mark.long
def test_a_cut_turn_is_trained_up_to_its_last_whole_character(
    tokenizer: str, template: str, messages: Any, sequence: int
) -> None:
    """Text and spans are transformers' own, ids the library's, and bytes those of its alphabet."""
    assume(not any("\ufffd" in message["content"] for message in messages))
    text, spans = theirs(TEMPLATES[template], messages)
    ids, marks = tokenized(tokenizer, text, spans, True)
    ours = Tokenizer(tokenizer_json(tokenizer), bos="<s>", eos="</s>")
    assert only(tokenizer, TEMPLATES[template], {"messages": messages}) == (ids, marks)
    length = longest_whole([raw(ours, token) for token in ids], min(sequence, len(ids)))
    made = rows([(ids, marks), ([9, 9], [True, True])], sequence, ours, packing="off")
    batch = made.take(0, len(made))
    filled = [row for row in range(len(made)) if batch.tokens[row].tolist()[:2] != [9, 9]]
    if not any(marks[1:length]):
        assert filled == [] and made.fitted.left_out == 1
        return
    (row,) = filled
    targets = [token if mark else IGNORED for token, mark in zip(ids[1:length], marks[1:length], strict=True)]
    assert batch.tokens[row, :length].tolist() == ids[:length]
    assert batch.targets[row].tolist() == targets + [IGNORED] * (sequence - length + 1)
    assert made.fitted.cut_tokens == len(ids) - length
    trained = b"".join(raw(ours, token) for token, mark in zip(ids[:length], marks[:length], strict=True) if mark)
    trained.decode(errors="strict")
