"""Options of `meshwright serve` for its engine: what each does, seen through the command line and HTTP."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.interface.trained import serving
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.http_server import HttpServer
from meshwright.verbs.main import main
from tests.serving.http.running import asked_once
from tests.verbs import toy
from tests.verbs.toy import refused

REPEATED = "def f1(a): return a\ndef f1(a): return a\ndef f1("


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    assert main(toy.train(toy.write_texts(folder), folder / "run")) == 0
    return folder / "run"


class Served:
    """Results of one command line."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.metrics, self.configuration = "", ""
        self.engine: ServingEngine | None = None

    @property
    def running_engine(self) -> ServingEngine:
        assert self.engine is not None
        return self.engine

    def counted(self, name: str) -> float:
        line = next(line for line in self.metrics.splitlines() if line.startswith(f"meshwright:{name}_total"))
        return float(line.rpartition(" ")[2])


Serve = Callable[..., Served]


@pytest.fixture
def serve(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Serve:
    """Runs the verb in this process, asks it questions over HTTP, one after the other, and ends it. The last answer
    counts."""

    def run_verb(*words: str | Path, before: Sequence[str] = ()) -> Served:
        served = Served()

        def once(server: HttpServer) -> None:
            body = {"max_tokens": 40, "temperature": 0, "return_token_ids": True}
            asked = [("/v1/completions", {**body, "prompt": prompt}) for prompt in (*before, REPEATED)]
            *_, answer, metrics = asked_once(server, *asked, ("/metrics", None))
            served.ids, served.metrics = answer["choices"][0]["token_ids"], metrics.decode()
            served.engine = server.engine

        monkeypatch.setattr(serving, "run", once)
        assert main(["serve", str(run), "--port", "0", "--exact", "--verbose", *map(str, words)]) == 0
        printed = capsys.readouterr().out
        served.configuration = " ".join(printed[printed.index("  settings ") :].split())  # below the address
        return served

    return run_verb


def each(engine: ServingEngine) -> float:
    """Bytes of a block."""
    return engine.cache.bytes / (engine.cache.number + 2)


def test_guesses_change_no_answer_and_are_counted(serve: Serve, run: Path) -> None:
    plain = serve()
    assert "guess_tokens=0" in plain.configuration and plain.counted("spec_decode_num_draft_tokens") == 0
    by_look_up = serve("--guess-tokens", "6", "--guess-ngram", "3")
    assert "guess_tokens=6 guess_ngram=3" in by_look_up.configuration
    by_draft = serve("--draft", run)
    assert f"guess_tokens=8 draft={run}" in by_draft.configuration
    for served in (by_look_up, by_draft):
        assert served.ids == plain.ids
        assert 0 < served.counted("spec_decode_num_accepted_tokens") <= served.counted("spec_decode_num_draft_tokens")
    assert by_draft.counted("spec_decode_num_accepted_tokens") == by_draft.counted("spec_decode_num_draft_tokens")
    for served in (plain, by_look_up, by_draft):
        assert served.counted("generation_tokens") == len(served.ids)


def test_forms_of_the_cache(serve: Serve) -> None:
    """Codes are a quarter of fp32 and a little more: so many more fit."""
    plain = serve("--cache-mib", "1", "--block", "8", "--no-compiled", "--no-packed").running_engine
    assert (plain.cache.size, plain.cache.loops, plain.cache.form) == (8, None, "model")
    for form in ("int8", "fp8"):
        coded = serve("--cache-mib", "1", "--block", "8", "--cache-dtype", form)
        assert coded.running_engine.cache.form == form and f"cache_dtype={form}" in coded.configuration
        assert 3 < (each(plain) / each(coded.running_engine)) < 4
        assert coded.running_engine.cache.loops is not None


def test_sizes_of_a_step_and_the_head(serve: Serve) -> None:
    served = serve(
        "--most-tokens", "96", "--most-sequences", "5", "--copies-mib", "0", "--head", "int8", "--longest", "90",
        "--prompt-tokens", "7",
    )  # fmt: skip
    assert "most_tokens=96 prompt_tokens=7 most_sequences=5 longest=90" in served.configuration
    assert served.running_engine.scheduler.prompt_tokens == 7
    assert "head=int8" in served.configuration and "copies_bytes=0" in served.configuration
    assert (served.running_engine.scheduler.most_tokens, served.running_engine.scheduler.most_sequences) == (96, 5)
    assert served.running_engine.longest == 90 and len(served.ids) == 40
    default = serve("--most-sequences", "300").running_engine.scheduler
    assert (default.most_tokens, default.prompt_tokens) == (600, 128)


def test_prefixes_in_host_memory(serve: Serve) -> None:
    """A cache of a few blocks forgets the first prompt while it answers others."""
    small = ("--most-sequences", "1", "--longest", "90", "--block", "8")
    options, before = ("--host-cache-mib", "1"), (REPEATED, "class C1:\n    value = 1\n" * 2, "def g(y):\n    return y")
    plain = serve(*small, before=before)
    hosted = serve(*small, *options, before=before)
    assert "host_cache_bytes=1048576" in hosted.configuration
    assert hosted.ids == plain.ids and plain.counted("host_cache_hits") == 0
    assert 8 <= hosted.counted("host_cache_hits") <= hosted.counted("prefix_cache_hits")
    assert hosted.counted("host_cache_saved_blocks") > 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cache-dtype", "int4"], "--cache-dtype int4 is not known: take one of model, fp8, int8"),
        (["--head", "fp8"], "--head fp8 is not known: take one of model, int8"),
        (["--block", "0"], "--block 0 must be at least 1"),
        (["--cache-mib", "-1"], "see meshwright serve --help"),
        (["--most-tokens", "8"], "--most-tokens 8 must exceed --most-sequences 64"),
        (["--guess-tokens", "0"], "--guess-tokens 0 must be at least 1"),
        (["--guess-ngram", "3"], "--guess-ngram 3 has no effect without guesses: add --guess-"),
        (["--guess-ngram", "3", "--draft", "RUN"], "leave one out"),
        (["--draft", "nowhere"], "--draft nowhere does not exist"),
        (["--copies-mib", "64", "--cache-dtype", "int8"], "--copies-mib 64 has no effect with --cache-dtype int8"),
        (["--longest", "100000"], "--longest 100000 is beyond the model's"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    run: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    options = [str(run) if word == "RUN" else word for word in words]
    assert expected in refused(capsys, "serve", run, "--port", "0", *options)


def test_a_draft_with_another_vocabulary(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from meshwright.formats.hub import export_folder
    from meshwright.model import build
    from meshwright.observe.oracle.features import shrink

    other = build(shrink("llama-3.1-8b"))
    options: dict[str, Any] = {"shape": other.shape, "tokenizer": None, "dtype": other.embed.weight.dtype}
    export_folder(tmp_path / "other", model_tensors=other.state_dict().items(), **options)
    printed = refused(capsys, "serve", run, "--port", "0", "--draft", tmp_path / "other")
    assert "take a draft model with the same tokenizer" in printed


def test_what_a_user_may_change_is_printed_with_its_option(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(serving, "run", asked_once)
    assert main(["serve", str(run), "--port", "0", "--most-sequences", "5", "--guess-tokens", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    below = lines[next(index for index, line in enumerate(lines) if "answers at" in line) + 1 :]
    assert [line[2:12].strip() for line in below if line[2] != " "] == [
        "model", "context", "cache", "at once", "access", "guesses", "more",
    ]  # fmt: skip
    printed = " ".join(" ".join(below).split())
    assert (
        max(map(len, below)) <= 100 and "5 answers (--most-sequences)" in printed and "6 tokens by look-up" in printed
    )
    main(["serve", "--help"])
    known = capsys.readouterr().out
    assert all(option in known for option in re.findall(r"--[a-z-]+", printed))
