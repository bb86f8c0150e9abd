"""`meshwright generate`: continue a prompt, or a file of them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface import options as asked
from meshwright.interface.answers.answer import check_new_file
from meshwright.interface.terminal.screen_text import printable
from meshwright.spec.errors import ArgumentError, PlanError

if TYPE_CHECKING:
    from meshwright.interface.trained.trained_model import Generated, TrainedModel


def generate(
    model: asked.ModelPath,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Or token ids to continue.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Or a file: one prompt per line, or .jsonl rows. Prints rows.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers per prompt; more than 1 prints rows.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's turn, by the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 128,
    greedy: asked.Greedy = False,
    temperature: asked.Temperature = None,
    top_k: asked.TopK = 0,
    top_p: asked.TopP = 1.0,
    seed: asked.Seed = 0,
    checkpoint: asked.Checkpoint = "last",
    dtype: asked.ServedDtype = "auto",
    adapter: asked.Adapter = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --prompts or --samples: new file for `meshwright report FILE`, with a line of numbers per step.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print ids, log-probabilities and text as one document.")
    ] = False,
) -> None:
    """Continue a prompt with a trained model. On a terminal the text appears as it is generated."""
    from meshwright.store.run_folder import check_model

    check_model(model, dtype=dtype, checkpoint=checkpoint)
    typed_ids = _ids(prompt_ids) if prompt_ids is not None else None
    chosen_temperature = asked.chosen_temperature(greedy, temperature)
    if [prompt is None, typed_ids is None, prompts is None].count(False) != 1:
        raise PlanError("give a prompt: either --prompt TEXT, --prompt-ids 1,2,3, or --prompts FILE")
    if samples < 1:
        raise ArgumentError("samples", samples, "must be at least 1")
    if max_new_tokens < 0:
        raise ArgumentError("max_new_tokens", max_new_tokens, "must be 0 or more")
    asked.check_adapter(adapter)
    if record is not None:
        if prompts is None and samples == 1:
            raise ArgumentError(
                "record", record, "needs answers of the serving engine", "add --prompts FILE, or --samples 2 or more"
            )
        check_new_file(record, "record")
    if chat and typed_ids is not None:
        raise PlanError("--chat and --prompt-ids contradict each other: a template takes text, as --prompt")

    from meshwright.serving.engine.answers.request_options import RequestOptions
    from meshwright.serving.engine.engine_options import EngineOptions
    from meshwright.verbs.generate.answer import questions_of, read_prompts

    options = RequestOptions(
        max_new_tokens=max_new_tokens, temperature=chosen_temperature, top_k=top_k, top_p=top_p, seed=seed,
        n=samples,
    )  # fmt: skip
    if prompts is not None or samples != 1:
        if typed_ids is not None:
            raise PlanError("--samples and --prompt-ids contradict each other: give a text, as --prompt or --prompts")
        questions = questions_of([prompt or ""], chat=chat) if prompts is None else read_prompts(prompts, chat=chat)
        from meshwright.interface.terminal.screen_text import print_json
        from meshwright.interface.trained.opening import load
        from meshwright.verbs.generate.answer import answer_prompts

        opened_model = load(model, dtype, checkpoint=checkpoint)
        for row in answer_prompts(opened_model, questions, options, EngineOptions(record=record), adapter):
            print_json(row)
        return
    from meshwright.interface.terminal.screen_text import print_json
    from meshwright.interface.trained.opening import load  # loads torch

    opened = load(model, dtype, checkpoint=checkpoint)
    encode = opened.encode_chat if chat else opened.encode
    ids = typed_ids if typed_ids is not None else encode(prompt or "")
    answer = partial(
        opened.generate, ids, max_new_tokens=max_new_tokens, temperature=chosen_temperature, top_k=top_k,
        top_p=top_p, seed=seed, adapter=adapter,
    )  # fmt: skip
    if json:
        generated = answer()
        print_json({"prompt_ids": ids, "ids": generated.ids, "logprobs": generated.logprobs, "text": generated.text})
    elif opened.tokenizer is None:
        print(*answer().ids, sep=",")
    else:
        stream_answer(opened, ids, answer)


def stream_answer(opened: "TrainedModel", ids: Sequence[int], answer: "Callable[..., Generated]") -> None:
    """Print the prompt, dimmed on a terminal, and the answer as it comes."""
    from meshwright.data.tokens.text_stream import TextStream
    from meshwright.interface.terminal.screen_text import console
    from meshwright.model.generate import check_prompt

    check_prompt(opened.model, ids)
    assert opened.tokenizer is not None
    visible = [token for token in ids if token != opened.tokenizer.bos]
    people = console()
    safe = printable if people.is_terminal else str
    stream = TextStream(opened.tokenizer.decode, visible, opened.tokenizer.texts)
    prompt = iter([safe(opened.tokenizer.decode(visible))])

    def show_prompt() -> None:
        # Not before the first token: until then, warnings (as of compilers) print whole lines.
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
        ids = [int(word) for word in text.split(",")]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise ArgumentError("prompt_ids", text, "is not understood", "give token ids as 1,2,3")
    return ids
