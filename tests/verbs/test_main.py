"""Every failure is one line on stderr and an exit code; nothing is lost."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright import __version__
from meshwright.interface.process import failure
from meshwright.interface.terminal import screen_text
from meshwright.spec.errors import DoesNotFit, OutsideTolerance, PlanError
from meshwright.verbs import main as entry
from meshwright.verbs.main import main
from tests.verbs import toy
from tests.verbs.toy import call, refused


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    assert main(toy.train(texts, folder)) == 0
    return folder


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"meshwright {__version__}\n", "")
    for words in ([], ["--help"], ["-h"]):
        code, out, err = call(capsys, *words)
        assert code == 0 and not err
        for verb in ("quickstart", "init", "train", "generate", "eval", "export", "import", "data", "schema"):
            assert f"\n  {verb} " in out
            assert call(capsys, verb, "--help")[0] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["frobnicate"], "frobnicate"),
        (["train", "--frob"], "see meshwright train --help"),
        (["generate"], "see meshwright generate --help"),
        (["generate", "r", "--max-new-tokens", "many"], "see meshwright generate --help"),
        (["generate", "r"], "--prompt TEXT"),
        (["generate", "r", "--prompt", "a", "--prompt-ids", "1"], "either"),
        (["generate", "r", "--prompt-ids", "1,x"], "--prompt-ids 1,x is not understood"),
        (["generate", "r", "--prompt-ids", "-1"], "--prompt-ids -1 is not understood"),
        (["generate", "r", "--prompt", "a", "--greedy", "--temperature", "1"], "contradict"),
        (["generate", "r", "--prompt", "a", "--max-new-tokens", "-1"], "must be 0 or more"),
        (["generate", "nowhere", "--prompt", "a"], "nowhere does not exist"),
        (["eval", "nowhere"], "nowhere does not exist"),
        (["export", "nowhere", "out"], "nowhere"),
        (["import", "nowhere"], "nowhere"),
        (["data"], "see meshwright data --help"),
    ],
)
def test_bad_usage_is_one_line_and_2(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text("{}")  # a model that is not there is refused before its options are
    assert expected in refused(capsys, *words)


def test_unknown_keys_are_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipe.steps" in refused(capsys, "train", "recipe.stepz=5")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("recipe.steps=many", "recipe.steps"),
        ("recipe.steps=-1", "recipe.steps"),
        ("recipe.learning_rate=.nan", "recipe.learning_rate"),
        ("recipe.precision=fp12", "recipe.precision"),
        ("model=llama-tinny", "llama-tiny"),
        ("layout.tp=5", "= 5 ranks and 1 was started: take layout.tp=1"),
        ("layout.micro_batch=3", "micro_batch=3"),
        ("recipe.sequence=100000", "sequence"),
        ("model.vocab=100", "model.vocab"),
        ("data=./does/not/exist", "does not exist"),
        ("resume=./no/checkpoint", "no/checkpoint"),
    ],
)
def test_bad_plans_leave_no_run(
    change: str, expected: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *toy.train(texts, tmp_path / "r", change))
    assert expected in line
    assert not list(tmp_path.glob("r/checkpoints/*"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "empty"),
        ("binary.txt", bytes(range(256)) * 40, "binary.txt"),
        ("latin.txt", b"caf\xe9 " * 500, "latin.txt"),
        ("rows.jsonl", b'{"text": "a"}\n{"tex', "rows.jsonl"),
        ("other.jsonl", b'{"words": "a"}\n', "text"),
    ],
)
def test_bad_data_is_named(
    name: str, content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in refused(capsys, *toy.train(tmp_path / name, tmp_path / "r"))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = [
        "recipe.learning_rate=1e38",
        "recipe.clip=0",
        "recipe.learning_rate_schedule=constant",
        "recipe.warmup_steps=0",
    ]
    wild += ["recipe.checkpoint_every=1", "recipe.precision=fp32"]
    line = refused(capsys, *toy.train(texts, tmp_path / "r", *wild))
    assert "step 2" in line and "step-000001" in line and "recipe.learning_rate" in line
    assert (tmp_path / "r" / "checkpoints" / "step-000001" / "COMMIT").is_file()


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Make writing beyond this many bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoint(
    texts: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, *toy.train(texts, tmp_path / "r", "recipe.steps=2"))[0] == 0
    size = max(path.stat().st_size for path in (tmp_path / "r" / "checkpoints" / "step-000002").iterdir())
    with largest_file(size // 2):
        line = refused(capsys, *toy.train(texts, tmp_path / "r", "recipe.steps=4", "resume=auto"))
    assert "checkpoint" in line and "could not be saved" in line
    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_second_run_in_the_same_folder_is_refused(texts: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert "resume=auto" in refused(capsys, *toy.train(texts, run))
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.fixture
def damaged(texts: Path, tmp_path: Path, run: Path) -> Path:
    """Copy the run, to be damaged."""
    shutil.copytree(run, tmp_path / "copy")
    for older in (tmp_path / "copy" / "checkpoints").iterdir():
        if older.name != "step-000012":
            shutil.rmtree(older)
    return tmp_path / "copy"


def shard(run: Path) -> Path:
    return next((run / "checkpoints" / "step-000012").glob("*.safetensors"))


def test_a_truncated_checkpoint_is_refused(damaged: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(shard(damaged), shard(damaged).stat().st_size - 100)
    words = toy.train(texts, damaged, "recipe.steps=14", "resume=auto")
    assert "truncated" in refused(capsys, *words)
    refused(capsys, "generate", damaged, "--prompt", "x")
    refused(capsys, "export", damaged, damaged.parent / "out")
    assert not (damaged.parent / "out").exists()


def test_a_tampered_checkpoint_is_refused(damaged: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with shard(damaged).open("r+b") as file:
        file.seek(-50, os.SEEK_END)
        byte = file.read(1)
        file.seek(-50, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    words = toy.train(texts, damaged, "recipe.steps=14", "resume=auto")
    assert "tampered" in refused(capsys, *words)
    assert "tampered" in refused(capsys, "eval", damaged)


FLIPPED, CUT, GONE, UNCOMMITTED = "flipped", "cut", "gone", "uncommitted"


@pytest.mark.parametrize("damage", [FLIPPED, CUT, GONE, UNCOMMITTED])
def test_damage_is_passed_over_in_a_run_and_refused_by_name(
    damage: str,
    run: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One rule for every verb and every kind of damage."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    newest, file = copy / "checkpoints" / "step-000012", shard(copy)
    if damage == FLIPPED:
        data = bytearray(file.read_bytes())
        data[-50] ^= 1
        file.write_bytes(data)
    elif damage == CUT:
        os.truncate(file, file.stat().st_size - 100)
    else:
        (file if damage == GONE else newest / "COMMIT").unlink()
    prompt = ("--prompt-ids", "1,2", "--max-new-tokens", "1", "--json")
    words = toy.train(texts, copy, "recipe.steps=12")
    for refused_words in (
        ("export", newest, tmp_path / "x"),
        ("generate", newest, *prompt),
        (*words, f"resume={newest}"),
    ):
        assert "take another one, or the run itself (resume=auto)" in refused(capsys, *refused_words)
    assert call(capsys, "generate", copy, *prompt)[0] == 0
    code, out, _ = call(capsys, "export", copy, tmp_path / "x", "--json")
    assert code == 0 and json.loads(out)["checkpoint"].endswith("step-000010")
    passed = [record.message for record in caplog.records if record.message.startswith("passed over: ")]
    assert len(passed) == 2 and all("step-000012: " in message and "delete" not in message for message in passed)
    code, out, _ = call(capsys, *words, "resume=auto")
    assert code == 0 and "steps 11 to 12" in out


def test_a_missing_shard_and_a_foreign_architecture_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = tmp_path / "hf"
    assert call(capsys, "export", run, hf)[0] == 0
    config = json.loads((hf / "config.json").read_text())
    weights = hf / "model.safetensors"
    weights.rename(tmp_path / "aside")
    line = refused(capsys, "import", hf, tmp_path / "imported")
    assert "hf" in line and not (tmp_path / "imported").exists()
    (tmp_path / "aside").rename(weights)
    (hf / "config.json").write_text(json.dumps({**config, "model_type": "bert", "architectures": ["BertModel"]}))
    line = refused(capsys, "import", hf, tmp_path / "imported")
    assert "bert" in line.lower() and not (tmp_path / "imported").exists()
    refused(capsys, "generate", hf, "--prompt", "x")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PlanError("a\n  b"), 2, "a b"),
        (DoesNotFit("x"), 3, "x"),
        (OutsideTolerance("x"), 4, "x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 3, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 3, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "No space left on device (/x/y): free some"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "Permission denied (/x)"),
        (ZeroDivisionError("division\nby zero"), 1, "ZeroDivisionError: division by zero (run with --debug"),
    ],
)
def test_each_error_has_its_line_and_code(error: BaseException, code: int, line: str) -> None:
    printed, status = failure.explain(error)
    assert status == code and printed.startswith(line) and "\n" not in printed


def test_errors_of_a_verb_reach_the_shell_and_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr("meshwright.planfile.commented", broken)
    assert "run with --debug" in refused(capsys, "init", code=1)
    for words in (["init", "--debug"], ["--debug", "init"]):
        code, _, err = call(capsys, *words)
        assert code == 1 and "Traceback" in err and "in broken" in err


def test_ctrl_c_outside_training_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.planfile.commented", interrupted)
    assert refused(capsys, "init", code=130) == "meshwright: interrupted"


def test_a_reader_that_goes_away_is_no_error() -> None:
    pipe = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert pipe.stdout and pipe.stderr
    pipe.stdout.close()
    assert pipe.wait(60) == entry.BROKEN_PIPE
    assert pipe.stderr.read() == b""
    pipe.stderr.close()


def test_numbers_that_are_none_and_paths_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    screen_text.print_json({"a": float("nan"), "b": [Path("x/y"), float("inf"), 1.5], "c": {"d": None}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": ["x/y", None, 1.5], "c": {"d": None}}


def test_light_verbs_load_no_torch_and_the_help_not_even_pydantic() -> None:
    """Imported modules decide the start-up time, which benchmarks/startup.py measures."""
    code = (
        "import sys\nfrom meshwright.verbs.main import main\n"
        "assert main({words!r}) == 0\n"
        "print('LOADED', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    for words, absent in (
        (["--help"], {"torch", "numpy", "rich", "pydantic", "yaml", "tokenizers", "typer"}),
        (["train", "--help"], {"torch", "numpy", "rich", "yaml", "tokenizers"}),
        (["init"], {"torch", "numpy", "rich", "tokenizers"}),
        (["schema"], {"torch", "numpy", "rich", "tokenizers"}),
        (["plan", "llama-3.2-1b", "--cluster", "h100x8", "--serve"], {"torch", "rich", "tokenizers"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words=words)], capture_output=True, text=True, check=True, timeout=60
        )
        loaded = set(done.stdout.rpartition("LOADED")[2].split())
        assert "meshwright" in loaded and not loaded & absent, words


def test_the_list_of_verbs_is_whole_and_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb appears once. Types have readable names, and --out is also -o."""
    from meshwright.interface.terminal import help as listed
    from meshwright.verbs.commands import application

    app = application()
    known = {entry.name for entry in (*app.registered_commands, *app.registered_groups)}
    assert known == set(listed.VERBS) and len(known) == sum(map(len, listed.GROUPS.values()))
    out = call(capsys, "--help")[1]
    assert [line.rstrip(":") for line in out.splitlines() if line.endswith(":")][:5] == list(listed.GROUPS)
    for verb in sorted(known - {"data"}):
        printed = call(capsys, verb, "--help")[1]
        assert "<" not in printed, verb
        assert ("--out " in printed) == ("-o, --out " in printed)


def test_waiting_threads_are_told_to_sleep_soon_unless_the_user_has_a_wish(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert call(capsys, "init")[0] == 0 and os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert call(capsys, "init")[0] == 0 and os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert call(capsys, "init")[0] == 0 and "GOMP_SPINCOUNT" not in os.environ
