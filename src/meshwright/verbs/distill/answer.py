"""`distill`: `train` with a teacher, and students by shape, by folder or by layers of the teacher."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import HasPlan, check_new_file, checked, folder_of
from meshwright.interface.planning.plan_reading import plan_of, read_plan, words_of
from meshwright.planfile.keys import overridden_keys
from meshwright.planfile.writing import dump
from meshwright.spec import Data, Plan, presets
from meshwright.spec.errors import ArgumentError, PlanError, argument
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.recipe.recipe import DISTILL
from meshwright.spec.weights.inventory import num_parameters
from meshwright.store.run_folder import RunFolder
from meshwright.training.step.watch import Watcher
from meshwright.verbs.train.answer import TrainAnswer, run_alone

if TYPE_CHECKING:
    from meshwright.compress.distill_sequences import WrittenAnswers

OF_TEACHER = re.compile(r"teacher:layers=(\d+)")
"""A student made of layers of its teacher."""
RATE = "recipe.learning_rate=1e-4"
"""Learning rate of a student that starts with weights: a third of the one for random weights."""
TEXTS = frozenset(("data", "data.path", "data.mixture", "mixture"))
"""Keys that name the training text."""


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

    Args:
        teacher: A Hugging Face folder or a run. The data of a run is read where no other is named.
        student: A preset, a Hugging Face folder, or "teacher:layers=6" for 6 layers of the teacher with their weights.

    All other arguments, and errors, are those of `train`.
    """
    words = [*plan, *(word for key, value in keys.items() for word in words_of(key, value))]
    parsed, word_resume = distillation_plan(words, str(teacher), str(student))
    return run_alone(
        parsed, resume if word_resume == "no" else word_resume, dry_run=dry_run, anyway=anyway, watchers=watchers
    )


def distillation_plan(
    words: Sequence[Any], teacher: str, student: str, *, processes: int | None = 1, notes: list[str] | None = None
) -> tuple[Plan, str]:
    """Return (plan, resume), as read_plan, of a student and its teacher.

    A student made of layers of its teacher is made here, if it does not exist yet.
    """
    text = _teacher_data(words, _teacher_word(words, teacher))
    added = [*distillation_words(words, teacher, student), *text]
    # Words of the user come last, since the last one of a key counts.
    plan, resume = read_plan([*added, *words], {}, processes=processes, notes=notes)
    if plan.teacher is None:
        raise PlanError(
            f"distill learns from a teacher: give {argument('teacher', 'DIR')}, a Hugging Face folder or a run"
        )
    named_keys = {str(word).partition("=")[0] for word in words if plan_of(word) is None}
    is_whole_plan = any(plan_of(word) is not None or "=" not in str(word) for word in words)
    if plan.init != RANDOM and not is_whole_plan and not named_keys & {"recipe.learning_rate", "recipe.lr"}:
        plan, resume = read_plan([*added, RATE, *words], {}, processes=processes, notes=[])
        if notes is not None:
            notes.append(f"distillation default: {RATE}, for a student that begins with weights")
    if notes is not None:
        if text:
            read = ", ".join(source.path for source in plan.data.mixture) or plan.data.path
            notes.append(f"distillation default: data={read}, which the teacher was trained on")
        notes.extend(_student_notes(plan, not student and not is_whole_plan and "model" not in named_keys))
    return plan, resume


def _student_notes(plan: Plan, unnamed: bool) -> Iterator[str]:
    """Yield notes about a default student, and about one larger than its teacher."""
    if unnamed:
        yield f"distillation default: student={plan.model.name}; teacher:layers=N takes layers of the teacher"
    size, theirs = num_parameters(plan.model.base), num_parameters(plan.teacher.base) if plan.teacher else 0
    if size > theirs:
        yield f"the student has more parameters than its teacher: {size:,} and {theirs:,}"


def distillation_words(words: Sequence[Any], teacher: str, student: str) -> list[str]:
    """Return the arguments as KEY=VALUE words. Raises ArgumentError for layers of a teacher without a folder."""
    theirs = _teacher_word(words, teacher)
    added = [f"recipe.objective={DISTILL}", *([f"teacher={teacher}"] if teacher else [])]
    if not student:
        return added
    layers = OF_TEACHER.fullmatch(student)
    if layers is None:
        if student.startswith("teacher:"):
            raise ArgumentError("student", student, "is not known", "write teacher:layers=N, as teacher:layers=6")
        _check_student(student)
        return [*added, f"model={student}"]
    folder = folder_of(Path(theirs).expanduser())
    if not theirs or not folder.is_dir():
        is_missing = "/" in theirs and not Path(theirs).expanduser().exists()  # without a slash it may be a preset
        lack = "does not exist" if is_missing else "has no weights"
        raise ArgumentError(
            "student",
            student,
            f"takes layers of a teacher, and {argument('teacher', theirs or '(nothing)')} {lack}",
            "give a Hugging Face folder or a run",
        )
    # Check the words before making the student: except for its layers, it has the shape of the teacher.
    read_plan([*added, f"model={folder}", *words], {}, processes=None, notes=[])
    from meshwright.compress.distill_student import student_of_layers

    return [*added, f"model={student_of_layers(folder, int(layers[1]))}"]


def _teacher_word(words: Sequence[Any], teacher: str) -> str:
    """Return the teacher, from the argument or from a word. Empty = none."""
    teachers = [str(word).partition("=")[2] for word in words if str(word).startswith("teacher=")]
    return teacher or (teachers[-1] if teachers else "")


def _teacher_data(words: Sequence[Any], teacher: str) -> list[str]:
    """Return the data of a teacher that is a run, as a word. Nothing if the words name a text or are a whole plan."""
    folder = Path(teacher).expanduser()
    if any(plan_of(word) is not None or "=" not in str(word) or overridden_keys(str(word)) & TEXTS for word in words):
        return []
    if not teacher or not (folder / "plan.yaml").is_file():
        return []
    plan = RunFolder.open(folder).plan
    # A student takes the tokenizer stored with its teacher.
    plan = replace(plan, data=replace(plan.data, tokenizer=Data().tokenizer))
    # A teacher of preferences was trained on pairs of answers, which are no text to distil on.
    is_unusable = plan.data == Data() or plan.recipe.traits.pairs
    return [] if is_unusable else [f"data={json.dumps(dump(plan)['data'], ensure_ascii=False)}"]


def _check_student(student: str) -> None:
    """Raise ArgumentError for a run, and for a name that is neither a preset nor a folder."""
    if (Path(student).expanduser() / "plan.yaml").is_file():
        raise ArgumentError(
            "student",
            student,
            "is a run",
            (
                f"export it (`meshwright export {student} OUT`) and give OUT, or take layers of the teacher, "
                "as teacher:layers=6"
            ),
        )
    if not folder_of(Path(student).expanduser()).exists():
        try:
            presets.published(student, "student")
        except PlanError as error:
            raise error.reworded(after="; or take layers of the teacher, as teacher:layers=6") from None


def write_answers(
    teacher: str | Path, prompts: str | Path, out: str | Path, *, beams: int = 1, temperature: float = 0.0,
    samples: int = 1, max_new_tokens: int = 256, seed: int = 0, limit: int = 0, dtype: str | None = None,
    keep_cut: bool = False,
) -> "WrittenAnswers":  # fmt: skip
    """Write a file of a teacher's answers to prompts, to tune a student on (sequence-level distillation).

    `beams`: above 1, search for the likeliest answer, else sample; temperature 0 = greedy. `samples`: answers per
    prompt. `limit`: most prompts, 0 = all. Answers that do not end, or are empty, are left out; with `keep_cut` those
    that do not end are written, and marked. Raises DataError, RunError.
    """
    from meshwright.compress.distill_sequences import Answerer, AnswerSearch, questions
    from meshwright.interface.trained.opening import load
    from meshwright.model.generate import Generation
    from meshwright.serving.engine.answers.request_options import RequestOptions

    how = AnswerSearch(
        beams=beams, temperature=temperature, samples=samples, max_new_tokens=max_new_tokens, seed=seed,
        keep_cut=keep_cut,
    )  # fmt: skip
    asked = questions(Path(prompts))
    check_new_file(Path(out))
    # All that can be wrong is checked: now load the teacher.
    opened = load(teacher, dtype)
    tokenizer, template = opened.chat_template()
    serving = opened.engine()

    def respond(prompts: Sequence[Sequence[int]], how: AnswerSearch, before: int) -> list[Generation]:
        requests = [
            serving.add(
                ids,
                RequestOptions(
                    max_new_tokens=how.max_new_tokens, temperature=how.temperature, n=how.samples, beams=how.beams,
                    early_stopping=True, seed=how.seed + before + index * how.samples,
                ),
            )
            for index, ids in enumerate(prompts)
        ]  # fmt: skip
        serving.run(requests)
        return [
            Generation(ids=answer.ids, logprobs=answer.logprobs) for request in requests for answer in request.answers
        ]

    answerer = Answerer(respond=respond, tokenizer=tokenizer, template=template, stop_ids=opened.stop_ids)
    return answerer.write(asked, Path(out), how, limit)
