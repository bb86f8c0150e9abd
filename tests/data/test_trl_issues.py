"""Masks where TRL's were wrong or silent: each test names the thread of github.com/huggingface/trl that it is from."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.chat.encoder import TRAINED
from meshwright.data.corpus.corpus import Corpus
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import CHATML, unmarked
from tests.data.test_rendering import turns
from tests.data.test_sample_cache import chats, folder, prepared, refused, trained_texts, write

__all__ = ["folder"]
END = "<|im_end|>"


def rows(corpus: Corpus, sequence: int, **data: Any) -> SampleRows:
    settings = Data(path="chat.jsonl", form="samples", **data)
    sample_rows = numbered_rows(settings, Recipe(sequence=sequence), corpus, corpus.train, shuffle=True)
    assert isinstance(sample_rows, SampleRows)
    return sample_rows


def targets(corpus: Corpus, sample_rows: SampleRows) -> list[list[int]]:
    """Return the trained tokens of each sample of all rows, in order."""
    batch, every = sample_rows.take(0, len(sample_rows)), []
    for documents, ids in zip(batch.documents, batch.targets, strict=True):
        each = [ids[(documents == document) & (ids >= 0)].tolist() for document in range(documents.max() + 1)]
        every += [document for document in each if document]
    return sorted(every)


def test_4147_a_conversational_completion_is_trained_without_its_heading(folder: Path) -> None:
    """trl#4147, fixed by trl#4201: the prompt was rendered without the words that ask for an answer, so that
    `<|im_start|>assistant` was trained."""
    write(folder, [{"prompt": turns("u"), "completion": turns("", "an answer")[1:]}])
    corpus = prepared(folder)
    assert trained_texts(corpus) == [f"an answer{END}\n"]
    stream = corpus.train.parts[0]
    assert stream.marks is not None
    begin = int(np.flatnonzero(np.asarray(stream.marks) & TRAINED)[0])
    assert corpus.tokenizer.decode(stream.read(0, begin)).endswith("<|im_start|>assistant\n")


def test_3279_prompts_are_masked_unless_asked_for(folder: Path) -> None:
    """trl#3279: of `messages` all is trained by default, questions too."""
    write(folder, chats(6))
    answers = [chat["messages"][1]["content"] + END for chat in chats(6)]
    assert trained_texts(prepared(folder)) == answers
    whole = trained_texts(prepared(folder, train_on="all"))
    assert all("question" in text and answer in text for text, answer in zip(whole, answers, strict=True))


def test_4201_a_template_without_generation_masks_the_same(folder: Path) -> None:
    """trl#4201: without `{% generation %}` all tokens were masked, and a warning was all that was said."""
    write(folder, chats(6))
    masks = []
    for source in (CHATML, unmarked(CHATML)):
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        masks.append(trained_texts(prepared(folder)))
    assert masks[0] == masks[1] and all(text.endswith(END) for text in masks[0])


def test_4201_a_set_of_which_nothing_is_trained_is_an_error(folder: Path) -> None:
    """trl#4201: the whole set masked, and training went on."""
    write(folder, [{"messages": turns("only a question")}])
    assert "is trained: every one is masked" in refused(folder)


@pytest.mark.parametrize("sequence", [256, 512])
def test_3728_packing_keeps_the_mask(folder: Path, sequence: int) -> None:
    """trl#3728 (and nanochat#582): packed rows were trained on every token, prompts too."""
    write(folder, chats(20))
    corpus = prepared(folder)
    packed, alone = (targets(corpus, rows(corpus, sequence, packing=packing)) for packing in ("best-fit", "off"))
    assert packed == alone and len(alone) == 20
    assert len(rows(corpus, sequence)) < 20 == len(rows(corpus, sequence, packing="off"))


def test_3927_a_sample_longer_than_a_row_keeps_the_mask_of_what_is_left(folder: Path) -> None:
    """trl#3927: ids were cut to max_length and their mask was not."""
    write(folder, [{"messages": turns("u", "word " * 60)}, *chats(3)])
    corpus = prepared(folder)
    cut_rows = rows(corpus, 128, packing="off")
    assert cut_rows.fitted.overlong == 1 and cut_rows.fitted.cut_tokens > 0
    whole = targets(corpus, rows(corpus, 1024, packing="off"))
    cut = targets(corpus, cut_rows)
    longest = max(whole, key=len)
    [short] = [document for document in cut if document not in whole]
    assert longest[: len(short)] == short and sorted(document for document in whole if document != longest) == sorted(
        document for document in cut if document != short
    )


def test_6668_samples_without_a_trained_token_are_no_loss_of_zero(folder: Path) -> None:
    """trl#6668: a prompt longer than max_length left every label masked, and a loss of 0 was reported."""
    long = {"messages": turns("why " * 80, "so")}
    write(folder, [long, *chats(3)])
    fitted = rows(prepared(folder), 256).fitted
    assert (fitted.retained, fitted.left_out, fitted.untrained) == (3, 1, 1)
    write(folder, [long] * 3)
    with pytest.raises(DataError, match=r"no sample has a trained token in its first recipe\.sequence=256 tokens"):
        rows(prepared(folder), 256)


def test_1623_every_answer_ends_and_its_end_is_trained(folder: Path) -> None:
    """trl#1623: models that never stop, because no end-of-text token was appended, or it was masked as padding."""
    write(folder, [{"messages": turns("u", "a", "v", "b")}, {"messages": turns("u", "c")}])
    assert [text.count(END) for text in trained_texts(prepared(folder))] == [2, 1]
    write(folder, [{"prompt": "2+2=", "completion": " 4"}, {"text": "a document"}])
    corpus = prepared(folder)
    stream = corpus.train.parts[0]
    for begin, end in pairwise([*stream.starts.tolist(), len(stream.tokens)]):
        assert stream.read(begin, end)[-1] == corpus.tokenizer.eos
    endless = unmarked(CHATML).replace("{{- '<|im_end|>' }}", "")
    (folder / "chat_template.jinja").write_text(endless, encoding="utf-8")
    write(folder, [{"messages": turns("u", "a")}])
    assert "ends with a special token, so the model would not learn to stop" in refused(folder)
