"""Answers to a file of prompts, all at once by the serving engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.compress.distill_sequences import READERS, Question, questions
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.spec.errors import DataError, argument

if TYPE_CHECKING:
    from meshwright.interface.trained.trained_model import TrainedModel

AT_ONCE = 256
"""Prompts handed to the engine together. Its options decide how many it computes at once."""


def read_prompts(path: Path, *, chat: bool = False) -> list[Question]:
    """Read prompts: rows with `prompt` or `messages` of .jsonl, .json and .parquet files, else lines.

    `chat`: a text is a user's turn. Raises DataError.
    """
    if path.suffix in READERS:
        prompts = list(questions(path))
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "") or "it is not UTF-8"
            raise DataError(f"{argument('prompts', path)} cannot be read as lines of prompts: {why}") from error
        prompts = [Question(text=line) for line in lines if line.strip()]
    if not prompts:
        raise DataError(f"{path} has no prompts: give one per line, or rows with prompt or messages")
    return [_user_turn(prompt.text) if chat and prompt.text else prompt for prompt in prompts]


def questions_of(texts: Sequence[str], *, chat: bool = False) -> list[Question]:
    """Return texts as prompts. `chat`: each is a user's turn."""
    return [_user_turn(text) if chat else Question(text=text) for text in texts]


def _user_turn(text: str) -> Question:
    return Question(messages=({"role": "user", "content": text},))


def answer_prompts(
    model: "TrainedModel", asked: Sequence[Question], options: RequestOptions, engine: EngineOptions | None = None,
    adapter: Path | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row for each answer, in the order of the prompts: `prompt` or `messages`, `ids`, `text`, `ending`.

    `adapter`: folder of a LoRA adapter to apply. Raises ArgumentError, PlanError, DataError.
    """
    from meshwright.interface.trained.trained_model import named_folder  # imports torch

    adapters = named_folder(adapter)
    serving = model.engine(engine, adapters=adapters)
    options = replace(options, adapter=next(iter(adapters), options.adapter))
    for begin in range(0, len(asked), AT_ONCE):
        batch = asked[begin : begin + AT_ONCE]
        prompts = [
            model.encode_messages(question.messages) if question.messages else model.encode(question.text)
            for question in batch
        ]
        requests = [serving.add(ids, options) for ids in prompts]
        for question, request in zip(batch, requests, strict=True):
            serving.run([request])
            prompt: dict[str, Any] = (
                {"messages": list(question.messages)} if question.messages else {"prompt": question.text}
            )  # fmt: skip
            for answer in request.answers:
                yield {**prompt, "text": answer.text, "ids": answer.ids, "ending": answer.ending}
