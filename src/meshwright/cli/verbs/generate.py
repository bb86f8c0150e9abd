"""`meshwright generate`: continues a prompt."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.engine_arguments import OneAdapter, check_adapter
from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from meshwright.api.trained_model import Generated, TrainedModel
    from meshwright.compress.distill_sequences import Question
    from meshwright.serve.request_options import RequestOptions

DEFAULT_TEMPERATURE = 0.8


def generate(
    model: Annotated[
        Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="Run folder, Hugging Face directory or .gguf file.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Or token ids to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Or a file: one prompt per line, or .jsonl rows; prints rows."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers to each prompt; prints rows.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says to the model: its chat template asks.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Above 1 bolder, below 1 safer.  [default: 0.8]")] = None,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that together reach p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="WHICH", help="Of a run: last, best by held-out loss, or a step.")
    ] = "last",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, as stored on a GPU.")] = "auto",
    adapter: OneAdapter = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print ids, log-probabilities and text as one document.")
    ] = False,
) -> None:
    """Continue a prompt with a trained model; on a terminal the text appears while it is made."""
    from meshwright.store.model_place import check_model

    check_model(model, dtype=dtype, checkpoint=checkpoint)
    given = _ids(prompt_ids) if prompt_ids is not None else None
    heat = chosen_temperature(greedy, temperature)
    _check(prompt, given, prompts, max_new_tokens, samples)
    check_adapter(adapter)
    if chat and given is not None:
        raise PlanError("--chat and --prompt-ids contradict each other: a template writes text, give it as --prompt")

    from meshwright.api.offline_answers import questions_of, read_prompts
    from meshwright.serve.request_options import RequestOptions

    options = RequestOptions(
        max_new_tokens=max_new_tokens, temperature=heat, top_k=top_k, top_p=top_p, seed=seed, n=samples
    )  # fmt: skip
    if prompts is not None or samples != 1:
        if given is not None:
            raise PlanError("--samples and --prompt-ids contradict each other: give a text, as --prompt or --prompts")
        asked = questions_of([prompt or ""], chat=chat) if prompts is None else read_prompts(prompts, chat=chat)
        _rows(model, dtype, checkpoint, asked, options, adapter)
        return
    from meshwright.api.model_opening import load  # loads torch
    from meshwright.cli.terminal.output import print_json

    opened = load(model, dtype, checkpoint=checkpoint)
    encode = opened.encode_chat if chat else opened.encode
    ids = given if given is not None else encode(prompt or "")
    answer = partial(
        opened.generate, ids, max_new_tokens=max_new_tokens, temperature=heat, top_k=top_k,
        top_p=top_p, seed=seed, adapter=adapter,
    )  # fmt: skip
    if json:
        found = answer()
        print_json({"prompt_ids": ids, "ids": found.ids, "logprobs": found.logprobs, "text": found.text})
    elif opened.tokenizer is None:
        print(*answer().ids, sep=",")
    else:
        tell(opened, ids, answer)


def tell(opened: "TrainedModel", ids: Sequence[int], answer: "Callable[..., Generated]") -> None:
    """Print the prompt, dimmed on a terminal, and what follows as it comes."""
    from meshwright.cli.terminal.output import console
    from meshwright.cli.terminal.streaming import printable
    from meshwright.data.text_stream import TextStream
    from meshwright.model.generate import check_prompt

    check_prompt(opened.model, ids)
    assert opened.tokenizer is not None
    spoken = [token for token in ids if token != opened.tokenizer.bos]
    people = console()
    safe = printable if people.is_terminal else str
    stream = TextStream(opened.tokenizer.decode, spoken, opened.tokenizer.texts)
    prompt = iter([safe(opened.tokenizer.decode(spoken))])

    def show_prompt() -> None:
        # Not before the first token: until then warnings, as of loops that are compiled, take whole lines of their own.
        for text in prompt:
            people.print(text, style="dim", end="", markup=False, soft_wrap=True)

    def show(token: int) -> None:
        show_prompt()
        if token not in opened.stop_ids:
            print(safe(stream.push(token)), end="", flush=True)

    answer(on_token=show)
    show_prompt()
    print(safe(stream.rest()))


def _ids(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise PlanError(f"--prompt-ids {text!r} is not understood: give token ids as 1,2,3")
    return found


def chosen_temperature(greedy: bool, temperature: float | None) -> float:
    """What --greedy and --temperature say together. PlanError where they contradict each other."""
    if greedy and temperature:
        raise PlanError(f"--greedy and --temperature {temperature} contradict each other: give one")
    return 0.0 if greedy else DEFAULT_TEMPERATURE if temperature is None else temperature


def _rows(
    model: Path, dtype: str, checkpoint: str, asked: "Sequence[Question]", options: "RequestOptions",
    adapter: Path | None,
) -> None:  # fmt: skip
    """Print a row of JSON for each answer to a prompt."""
    from meshwright.api.model_opening import load
    from meshwright.api.offline_answers import answer_prompts
    from meshwright.cli.terminal.output import print_json

    for row in answer_prompts(load(model, dtype, checkpoint=checkpoint), asked, options, adapter=adapter):
        print_json(row)


def _check(
    prompt: str | None, ids: Sequence[int] | None, prompts: Path | None, max_new_tokens: int, samples: int
) -> None:
    """What can be refused before torch is loaded."""
    if [prompt is None, ids is None, prompts is None].count(False) != 1:
        raise PlanError("give a prompt: either --prompt TEXT, --prompt-ids 1,2,3, or --prompts FILE")
    if samples < 1:
        raise PlanError(f"--samples {samples} must be at least 1")
    if max_new_tokens < 0:
        raise PlanError(f"--max-new-tokens {max_new_tokens} must be 0 or more")
