"""`distill`: `train` with a teacher, and students by shape, by folder or by layers of the teacher."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.arguments import HasPlan, checked
from meshwright.api.documents import check_new_file
from meshwright.api.plan_reading import plan_of, read_plan, words_of
from meshwright.api.training_run import Lines, TrainAnswer, run
from meshwright.planfile.overrides import overridden_keys
from meshwright.planfile.writing import dump
from meshwright.spec import Data, Plan, presets
from meshwright.spec.errors import ArgumentError, IllegalLayout, PlanError
from meshwright.spec.inventory import num_parameters
from meshwright.spec.objective_traits import DISTILL
from meshwright.spec.plan import RANDOM
from meshwright.spec.worlds import world_violation
from meshwright.store.run_folder import RunFolder
from meshwright.training.watch import Watcher

if TYPE_CHECKING:
    from meshwright.compress.distill_sequences import WrittenAnswers

OF_TEACHER = re.compile(r"teacher:layers=(\d+)")
"""A student by layers of its teacher."""
RATE = "recipe.learning_rate=1e-4"
"""Of a student that begins with weights: a third of what one begins with that has none."""
TEXTS = frozenset(("data", "data.path", "data.mixture", "mixture"))
"""Keys that name a text."""


@checked
def distill(
    *plan: str | Path | Plan | HasPlan,
    teacher: str | Path = "",
    student: str | Path = "",
    resume: str = "no",
    dry_run: bool = True,
    anyway: bool = False,
    watchers: Sequence[Watcher] | None = None,
    **keys: Any,
) -> TrainAnswer:
    """Train a student on the distributions of a teacher, in this process.

    `teacher`: a Hugging Face folder or a run, whose data is read where no other is named. `student`: a preset, a
    Hugging Face folder, or "teacher:layers=6" for so many layers of the teacher with their weights. All else is as for
    train. PlanError, DataError, RunError, DoesNotFit.
    """
    words = [*plan, *(word for key, value in keys.items() for word in words_of(key, value))]
    asked, also = distillation_plan(words, str(teacher), str(student))
    violation = world_violation(asked, 1)
    if violation:
        raise IllegalLayout(violation)
    seen = (Lines(),) if watchers is None else watchers
    return run(asked, resume=resume if also == "no" else also, dry_run=dry_run, anyway=anyway, watchers=seen)


def distillation_plan(
    words: Sequence[Any], teacher: str, student: str, *, processes: int | None = 1, notes: list[str] | None = None
) -> tuple[Plan, str]:
    """(plan, resume), as read_plan, of a student and its teacher. A student of its teacher's layers is made here, where
    it is not there yet."""
    text = _text_of_teacher(words, _named_teacher(words, teacher))
    added = [*distillation_words(words, teacher, student), *text]
    found, resume = read_plan([*added, *words], {}, processes=processes, notes=notes)
    if found.teacher is None:
        raise PlanError("distill learns from a teacher: give teacher=DIR, a Hugging Face folder or a run")
    given = {str(word).partition("=")[0] for word in words if plan_of(word) is None}
    whole = any(plan_of(word) is not None or "=" not in str(word) for word in words)
    if found.init != RANDOM and not whole and not given & {"recipe.learning_rate", "recipe.lr"}:
        found, resume = read_plan([*added, RATE, *words], {}, processes=processes, notes=[])
        if notes is not None:
            notes.append(f"distillation default: {RATE}, for a student that begins with weights")
    if notes is not None:
        if text:
            read = ", ".join(one.path for one in found.data.mixture) or found.data.path
            notes.append(f"distillation default: data={read}, which the teacher was trained on")
        notes.extend(_doubts(found, not student and not whole and "model" not in given))
    return found, resume


def _doubts(found: Plan, unnamed: bool) -> Iterator[str]:
    """About a student that nobody chose, and one that is as large as its teacher."""
    if unnamed:
        yield f"distillation default: student={found.model.name}; teacher:layers=N takes layers of the teacher"
    size, theirs = num_parameters(found.model.base), num_parameters(found.teacher.base) if found.teacher else 0
    if size > theirs:
        yield f"the student has more parameters than its teacher: {size:,} and {theirs:,}"


def distillation_words(words: Sequence[Any], teacher: str, student: str) -> list[str]:
    """KEY=VALUE words of what the arguments say. ArgumentError where a student of layers has no teacher's folder."""
    theirs = _named_teacher(words, teacher)
    added = [f"recipe.objective={DISTILL}", *([f"teacher={teacher}"] if teacher else [])]
    if not student:
        return added
    layers = OF_TEACHER.fullmatch(student)
    if layers is None:
        if student.startswith("teacher:"):
            raise ArgumentError(f"student={student!r} is not known: write teacher:layers=N, as teacher:layers=6")
        _check_student(student)
        return [*added, f"model={student}"]
    folder = Path(theirs).expanduser()
    if not theirs or not folder.is_dir():
        raise ArgumentError(
            f"student={student!r} takes layers of a teacher, and teacher={theirs or '(nothing)'} has no "
            "weights: give a Hugging Face folder or a run"
        )
    # What is wrong with the words is said before the student is made; but for its layers, the teacher has its shape.
    read_plan([*added, f"model={folder}", *words], {}, processes=None, notes=[])
    from meshwright.compress.distill_student import student_of_layers

    return [*added, f"model={student_of_layers(folder, int(layers[1]))}"]


def _named_teacher(words: Sequence[Any], teacher: str) -> str:
    """As it was given, by argument or as a word; empty = it was not."""
    named = [str(word).partition("=")[2] for word in words if str(word).startswith("teacher=")]
    return teacher or (named[-1] if named else "")


def _text_of_teacher(words: Sequence[Any], teacher: str) -> list[str]:
    """The data of a teacher that is a run, as a word; nothing where the words name a text, or are a whole plan."""
    folder = Path(teacher).expanduser()
    if any(plan_of(word) is not None or "=" not in str(word) or overridden_keys(str(word)) & TEXTS for word in words):
        return []
    if not teacher or not (folder / "plan.yaml").is_file():
        return []
    plan = RunFolder.open(folder).plan
    plan = replace(plan, data=replace(plan.data, tokenizer=Data().tokenizer))  # the one beside the teacher
    known = plan.data == Data() or plan.recipe.traits.pairs
    return [] if known else [f"data={json.dumps(dump(plan)['data'], ensure_ascii=False)}"]


def _check_student(student: str) -> None:
    """ArgumentError for a name that is neither a preset nor a folder, and for a run."""
    if (Path(student).expanduser() / "plan.yaml").is_file():
        raise ArgumentError(
            f"student={student!r} is a run: export it (`meshwright export {student} OUT`) and give OUT, or "
            "take layers of the teacher, as teacher:layers=6"
        )
    if not Path(student).expanduser().exists():
        try:
            presets.published(student, f"student={student[: presets.LONGEST]!r}")
        except PlanError as error:
            raise ArgumentError(f"{error}; or take layers of the teacher, as teacher:layers=6") from None


def write_answers(
    teacher: str | Path, prompts: str | Path, out: str | Path, *, beams: int = 1, temperature: float = 0.0,
    samples: int = 1, max_new_tokens: int = 256, seed: int = 0, limit: int = 0, dtype: str | None = None,
) -> "WrittenAnswers":  # fmt: skip
    """A file of what a teacher answers to the prompts of a file, to tune a student on (sequence-level distillation).

    `beams`: more than one searches for the likeliest answer; else it is sampled, at temperature 0 greedily. `samples`
    answers to each prompt; `limit` prompts, 0 = all. Answers that do not end, or say nothing, are left out.
    DataError, RunError.
    """
    from meshwright.api.model_opening import load
    from meshwright.compress.distill_sequences import Answerer, AnswerSearch, questions
    from meshwright.model.generate import Generation
    from meshwright.serve.request_options import RequestOptions

    how = AnswerSearch(
        beams=beams, temperature=temperature, samples=samples, max_new_tokens=max_new_tokens, seed=seed
    )  # fmt: skip
    asked = questions(Path(prompts))
    check_new_file(Path(out))
    opened = load(teacher, dtype)
    tokenizer, template = opened.chat_template()
    serving = opened.engine()

    def respond(prompts: Sequence[Sequence[int]], how: AnswerSearch, before: int) -> list[Generation]:
        asked = [
            serving.add(
                one,
                RequestOptions(
                    max_new_tokens=how.max_new_tokens, temperature=how.temperature, n=how.samples, beams=how.beams,
                    early_stopping=True, seed=how.seed + before + place * how.samples,
                ),
            )
            for place, one in enumerate(prompts)
        ]  # fmt: skip
        serving.run(asked)
        return [Generation(ids=one.ids, logprobs=one.logprobs) for request in asked for one in request.answers]

    answerer = Answerer(respond=respond, tokenizer=tokenizer, template=template, stop_ids=opened.stop_ids)
    return answerer.write(asked, Path(out), how, limit)
