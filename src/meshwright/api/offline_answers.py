"""Answers to a file of prompts, all at once by the serving engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.compress.distill_sequences import READERS, Question, questions
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_options import RequestOptions
from meshwright.spec.errors import DataError

if TYPE_CHECKING:
    from meshwright.api.trained_model import TrainedModel

AT_ONCE = 256
"""Prompts that the engine is given together; it computes as many of them at once as its options say."""


def read_prompts(path: Path, *, chat: bool = False) -> list[Question]:
    """Prompts of a .jsonl, .json or .parquet file, whose rows have `prompt` or `messages`; of another file its lines.
    `chat`: a text is what a user says. DataError."""
    if path.suffix in READERS:
        found = list(questions(path))
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "") or "it is not UTF-8"
            raise DataError(f"prompts={path} cannot be read as lines of prompts: {why}") from error
        found = [Question(text=line) for line in lines if line.strip()]
    if not found:
        raise DataError(f"{path} has no prompts: give one a line, or rows with prompt or messages")
    return [_said(one.text) if chat and one.text else one for one in found]


def questions_of(texts: Sequence[str], *, chat: bool = False) -> list[Question]:
    """Prompts; `chat`: each is what a user says."""
    return [_said(text) if chat else Question(text=text) for text in texts]


def _said(text: str) -> Question:
    return Question(messages=({"role": "user", "content": text},))


def answer_prompts(
    model: "TrainedModel", asked: Sequence[Question], options: RequestOptions, engine: EngineOptions | None = None,
    adapter: Path | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each answer, in the order of the prompts: `prompt` or `messages`, `ids`, `text` and `ending`.
    `adapter`: the folder of one that all answers have. ArgumentError, PlanError, DataError."""
    from meshwright.api.adapter_opening import named  # loads torch

    adapters = named(adapter)
    serving = model.engine(engine, adapters=adapters)
    options = replace(options, adapter=next(iter(adapters), options.adapter))
    for begin in range(0, len(asked), AT_ONCE):
        some = asked[begin : begin + AT_ONCE]
        ids = [model.encode_messages(one.messages) if one.messages else model.encode(one.text) for one in some]
        requests = [serving.add(one, options) for one in ids]
        for question, request in zip(some, requests, strict=True):
            serving.run([request])
            given: dict[str, Any] = (
                {"messages": list(question.messages)} if question.messages else {"prompt": question.text}
            )  # fmt: skip
            for answer in request.answers:
                yield {**given, "text": answer.text, "ids": answer.ids, "ending": answer.ending}
