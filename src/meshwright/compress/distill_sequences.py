"""Sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947): a teacher answers prompts for a student to learn.

Only the text of the answers is used, so student and teacher may have different tokenizers.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data import Tokenizer
from meshwright.data.chat.samples import CUT_OFF, Continuation, Conversation, Preference, sample
from meshwright.data.chat.template import ChatTemplate
from meshwright.data.text.rows import Malformed, Row, json_array, jsonl, parquet, readable_location
from meshwright.spec.errors import DataError, argument

if TYPE_CHECKING:
    from meshwright.model.generate import Generation

AT_ONCE = 64
"""Prompts per batch of the teacher."""
READERS = {".jsonl": jsonl, ".json": json_array, ".parquet": parquet}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and the row that it forms with its answer."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages of a conversation before the answer."""
    text: str = ""
    """Prompt of a continuation."""

    def row(self, answer: str, *, is_cut: bool = False) -> dict[str, Any]:
        """Return the row in the form that `tune` reads. `is_cut`: the answer does not end."""
        mark = {CUT_OFF: True} if is_cut else {}
        if self.messages:
            return {"messages": [*map(dict, self.messages), {"role": "assistant", "content": answer}], **mark}
        return {"prompt": self.text, "completion": answer, **mark}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSearch:
    """Settings of the teacher's generation: sampling, or beam search with more than one beam."""

    beams: int = 1
    temperature: float = 0.0
    samples: int = 1
    """Answers per prompt. Beam search returns one."""
    max_new_tokens: int = 256
    seed: int = 0
    keep_cut: bool = False
    """Write answers that do not end within max_new_tokens, too, and mark their rows."""

    def __post_init__(self) -> None:
        for name in ("beams", "samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)} must be at least 1")
        if self.beams > 1 and (self.temperature or self.samples > 1):
            raise DataError(
                f"{argument('beams', self.beams)} searches for one answer: leave temperature and samples out, or "
                f"{argument('beams', 1)}"
            )
        if self.samples > 1 and not self.temperature:
            raise DataError(
                f"{argument('samples', self.samples)} at {argument('temperature', 0)} are the same answer: give "
                f"{argument('temperature', 0.8)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswers:
    """Counts of the answers written and dropped."""

    written: int
    left_out: int
    """Answers that were empty, or did not end within max_new_tokens and were not wanted (`keep_cut`)."""
    cut: int = 0
    """Written answers that do not end. Their rows are marked, so that students do not learn to end there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """A teacher with its tokenizer and chat template."""

    respond: "Respond"
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: tuple[int, ...]

    def ids(self, question: Question) -> list[int]:
        """Return the token ids of a prompt."""
        if not question.messages:
            return self.tokenizer.begin(question.text)
        text = self.template.render(list(question.messages), prompt=True).text
        ids: list[int] = self.tokenizer.encode(text, special=True).tolist()
        return ids

    def write(self, questions: Iterator[Question], out: Path, how: AnswerSearch, limit: int = 0) -> WrittenAnswers:
        """Write a row per answer. The file appears complete or not at all.

        Raises DataError when no answer ended or the file exists.
        """
        if out.exists():
            raise DataError(f"{out} is there already: name another file")
        # The file is named by the process, so two writers never share one.
        fresh, written, left_out, cut = out.with_name(f".{out.name}.{os.getpid()}"), 0, 0, 0
        try:
            with fresh.open("w", encoding="utf-8") as file:
                asked = islice(questions, limit) if limit else questions
                while batch := list(islice(asked, AT_ONCE)):
                    for question, prompt, generation in self._answered(batch, how, written + left_out):
                        answer, is_cut = self._text(prompt, generation)
                        # Without a mark, an answer that was cut off would teach the student to end there.
                        if not answer.strip() or (is_cut and not how.keep_cut):
                            left_out += 1
                            continue
                        file.write(json.dumps(question.row(answer, is_cut=is_cut), ensure_ascii=False) + "\n")
                        written += 1
                        cut += is_cut
            if not written:
                raise DataError(
                    f"none of {left_out} answers has text and ends within "
                    f"{argument('max_new_tokens', how.max_new_tokens)}: raise it, keep what there is with "
                    f"{argument('keep_cut', True)}, or take a teacher that was tuned on answers"
                )
            fresh.replace(out)
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
        return WrittenAnswers(written=written, left_out=left_out, cut=cut)

    def _text(self, prompt: Sequence[int], generation: "Generation") -> tuple[str, bool]:
        """Return the text of an answer, and whether it stops at the limit."""
        ends = bool(generation.ids) and generation.ids[-1] in self.stop_ids
        text = self.tokenizer.continuation_text(prompt, generation.ids[:-1] if ends else generation.ids)
        # The limit may fall inside of a character.
        return (text, False) if ends else (text.rstrip("\N{REPLACEMENT CHARACTER}"), True)

    def _answered(
        self, batch: Sequence[Question], how: AnswerSearch, before: int
    ) -> Iterator[tuple[Question, list[int], "Generation"]]:
        """Yield (question, ids of its prompt, answer) of each answer."""
        prompts = [self.ids(question) for question in batch]
        asked = [pair for pair in zip(batch, prompts, strict=True) for _ in range(how.samples)]
        for pair, answer in zip(asked, self.respond(prompts, how, before), strict=True):
            yield *pair, answer


Respond = Callable[[Sequence[Sequence[int]], AnswerSearch, int], Sequence["Generation"]]
"""(prompts, settings, number of earlier answers) -> answers, `samples` in a row for each prompt.

The number of earlier answers gives each sampled answer its own seed."""


def questions(path: Path) -> Iterator[Question]:
    """Yield the prompts of a file in order.

    Rows may be conversations (without their last answer), prompts with or without a completion, or preferences. Raises
    DataError naming a row without a prompt.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} holds no rows of prompts: give .jsonl, .json or .parquet")
    return map(_question, reader(path))


def _question(row: Row) -> Question:
    where, fields = row
    if not isinstance(fields, Malformed) and set(fields) == {"prompt"}:
        fields = {**fields, "completion": "" if isinstance(fields["prompt"], str) else []}
        prompt = fields["prompt"]
        question = Question(text=prompt) if isinstance(prompt, str) else Question(messages=tuple(prompt))
    else:
        parsed = sample((where, fields))
        question = _from_sample(parsed.chosen if isinstance(parsed, Preference) else parsed)
    if not question.messages and not question.text:
        raise DataError(f"{readable_location(where)}: has no prompt that a teacher could answer")
    return question


def _from_sample(parsed: object) -> Question:
    if isinstance(parsed, Continuation):
        return Question(text=parsed.prompt)
    if not isinstance(parsed, Conversation):
        return Question()
    turns = list(parsed.messages)
    while turns and turns[-1].get("role") != "assistant":
        turns.pop()
    return Question(messages=tuple(turns[:-1]))
