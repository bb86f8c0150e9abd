"""Sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947): a teacher answers prompts, and a student is tuned
on what it said. The teacher's tokens do not matter: this is how a student with another tokenizer learns.
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
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.rows import Malformed, Row, json_array, jsonl, parquet, spoken
from meshwright.data.samples import Continuation, Conversation, Preference, sample
from meshwright.spec.errors import DataError

if TYPE_CHECKING:
    from meshwright.model.generate import Generation

AT_ONCE = 64
"""Prompts that are given to the teacher together."""
READERS = {".jsonl": jsonl, ".json": json_array, ".parquet": parquet}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and the row that its answer makes."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """Of a conversation, up to the answer."""
    text: str = ""
    """Of a continuation."""

    def row(self, answer: str) -> dict[str, Any]:
        """As `tune` reads it."""
        if self.messages:
            return {"messages": [*map(dict, self.messages), {"role": "assistant", "content": answer}]}
        return {"prompt": self.text, "completion": answer}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSearch:
    """How an answer is found: by sampling, or by beams where there is more than one."""

    beams: int = 1
    temperature: float = 0.0
    samples: int = 1
    """Answers to each prompt; beams find one."""
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("beams", "samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)} must be at least 1")
        if self.beams > 1 and (self.temperature or self.samples > 1):
            raise DataError(
                f"beams={self.beams} searches for one answer: leave temperature and samples out, or beams=1"
            )
        if self.samples > 1 and not self.temperature:
            raise DataError(f"samples={self.samples} at temperature=0 are the same answer: give temperature=0.8")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswers:
    """What became of the prompts."""

    written: int
    left_out: int
    """Answers that did not end within max_new_tokens, from which a student would learn not to end, or say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """A teacher with what it reads and writes by."""

    respond: "Respond"
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: tuple[int, ...]

    def ids(self, asked: Question) -> list[int]:
        """Of a prompt."""
        if not asked.messages:
            return self.tokenizer.begin(asked.text)
        text = self.template.render(list(asked.messages), prompt=True).text
        found: list[int] = self.tokenizer.encode(text, special=True).tolist()
        return found

    def write(self, questions: Iterator[Question], out: Path, how: AnswerSearch, limit: int = 0) -> WrittenAnswers:
        """A row for each answer; the file appears whole or not at all. DataError where no answer ended, or where the
        file is there."""
        if out.exists():
            raise DataError(f"{out} is there already: name another file")
        fresh, written, left_out = out.with_name(f".{out.name}.{os.getpid()}"), 0, 0
        try:
            with fresh.open("w", encoding="utf-8") as file:
                asked = islice(questions, limit) if limit else questions
                while some := list(islice(asked, AT_ONCE)):
                    for one, prompt, found in self._answered(some, how, written + left_out):
                        answer = self._ended(prompt, found)
                        if not answer.strip():
                            left_out += 1
                            continue
                        file.write(json.dumps(one.row(answer), ensure_ascii=False) + "\n")
                        written += 1
            if not written:
                raise DataError(
                    f"none of {left_out} answers said something and ended within max_new_tokens={how.max_new_tokens}: "
                    "allow more tokens, or take a teacher that was tuned on answers"
                )
            fresh.replace(out)
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
        return WrittenAnswers(written=written, left_out=left_out)

    def _ended(self, prompt: Sequence[int], found: "Generation") -> str:
        """The text of an answer that ended; empty where it did not."""
        ended = bool(found.ids) and found.ids[-1] in self.stop_ids
        return self.tokenizer.text_behind(prompt, found.ids[:-1]) if ended else ""

    def _answered(
        self, some: Sequence[Question], how: AnswerSearch, before: int
    ) -> Iterator[tuple[Question, list[int], "Generation"]]:
        """Each answer with its question and the ids of that."""
        prompts = [self.ids(one) for one in some]
        asked = [pair for pair in zip(some, prompts, strict=True) for _ in range(how.samples)]
        for pair, answer in zip(asked, self.respond(prompts, how, before), strict=True):
            yield *pair, answer


Respond = Callable[[Sequence[Sequence[int]], AnswerSearch, int], Sequence["Generation"]]
"""Answers to prompts, `samples` to each, one behind the other. The number is that of the answers before: sampled ones
have seeds of their own."""


def questions(path: Path) -> Iterator[Question]:
    """The prompts of a file, in its order: conversations without their last answer, prompts with or without a
    completion, the prompts of preferences. DataError names the row that has none."""
    reader = READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} holds no rows of prompts: give .jsonl, .json or .parquet")
    return map(_question, reader(path))


def _question(row: Row) -> Question:
    where, fields = row
    if not isinstance(fields, Malformed) and set(fields) == {"prompt"}:
        fields = {**fields, "completion": "" if isinstance(fields["prompt"], str) else []}
        asked = fields["prompt"]
        found = Question(text=asked) if isinstance(asked, str) else Question(messages=tuple(asked))
    else:
        one = sample((where, fields))
        found = _of_sample(one.chosen if isinstance(one, Preference) else one)
    if not found.messages and not found.text:
        raise DataError(f"{spoken(where)}: has no prompt that a teacher could answer")
    return found


def _of_sample(one: object) -> Question:
    if isinstance(one, Continuation):
        return Question(text=one.prompt)
    if not isinstance(one, Conversation):
        return Question()
    turns = list(one.messages)
    while turns and turns[-1].get("role") != "assistant":
        turns.pop()
    return Question(messages=tuple(turns[:-1]))
