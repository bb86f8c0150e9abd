"""Checkpoints: what goes in comes out to the last bit, or a sentence says why not."""

import hashlib
import json
import pickle
import random
import shutil
import struct
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.spec.errors import CheckpointError
from meshwright.store import checkpoint, checkpoint_files, checkpoint_folder


def state() -> dict[str, Tensor]:
    """Every kind of tensor a run may hold."""
    torch.manual_seed(0)
    base = torch.randn(6, 5)
    return {
        "model.layers.0.attention.q.weight": torch.randn(8, 16),
        "model.layers.10.norm.weight": torch.nn.Parameter(torch.randn(16).bfloat16()),
        "a/b c.ä": torch.randn(3),
        "half": torch.randn(3, 5).half(),
        "double": torch.randn(4, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(2**40),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "big": torch.tensor([2**63], dtype=torch.uint64),
        "turned": base.T,
        "part": base[1:3, ::2],
        "tied": base,
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


VALUES = {"step": 3, "rate": 0.1 + 0.2, "big": 2**80, "none": None, "text": "ä\n", "deep": {"list": [1, True, [None]]}}


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor.detach(), 1) for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(entry: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert entry.keys() == other.keys()
    for name in entry:
        assert bits(entry[name]) == bits(other[name]), name


def small(folder: Path, step: int = 3, score: float | None = None, keep_last: int = 9) -> Path:
    tensors = {"w": torch.full((4, 3), float(step)), "b": torch.arange(3)}
    return checkpoint.save(folder, step=step, tensors=tensors, values=VALUES, score=score, keep_last=keep_last)


def small_blank() -> dict[str, Tensor]:
    return {"w": torch.zeros(4, 3), "b": torch.zeros(3, dtype=torch.int64)}


def refusal(path: Path, tensors: dict[str, Tensor] | None = None, **options: bool) -> str:
    """The sentence with which loading is refused; nothing may have been touched."""
    tensors = small_blank() if tensors is None else tensors
    before = {name: bits(tensor) for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, tensors, **options)
    assert {name: bits(tensor) for name, tensor in tensors.items()} == before
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


@pytest.mark.parametrize("file_bytes", [1, 200, 2**28], ids=["file a tensor", "some files", "one file"])
def test_every_kind_of_tensor_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int) -> None:
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", file_bytes)
    tensors = state()
    path = checkpoint.save(tmp_path / "new" / "folder", step=60, tensors=tensors, values=VALUES, score=1.0, keep_last=1)
    assert path == tmp_path / "new" / "folder" / "step-000060"
    files = len(list(path.glob("*.safetensors")))
    assert files == {1: len(tensors), 2**28: 1}.get(file_bytes, files) and (file_bytes != 200 or 2 < files < 16)
    loaded = blank(tensors)
    assert checkpoint.load(path, loaded) == VALUES == checkpoint.read_values(path)
    assert_same(loaded, tensors)
    assert checkpoint.names(path) == {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda n: n[:4] != "rng."),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
        ),
        max_size=5,
    ).filter(lambda names: "__metadata__" not in names),
    st.integers(0, 10**7),
)
def test_any_shapes_and_names(tmp_path: Path, kinds: dict[str, tuple[list[int], torch.dtype]], step: int) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in kinds.items()}
    path = checkpoint.save(tmp_path, step=step, tensors=tensors, values={}, score=None, keep_last=1)
    loaded = blank(tensors)
    checkpoint.load(path, loaded)
    assert_same(loaded, tensors)


def test_torch_is_quiet_about_one_process_and_about_nothing_else(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        checkpoint.load(small(tmp_path), small_blank())
        assert not heard
        warnings.warn("still heard", stacklevel=1)
        assert len(heard) == 1


def test_the_files_are_those_of_torchs_own_writer(tmp_path: Path) -> None:
    """Header and bytes, so that torch's tools and readers know them; order and padding are free."""
    tensors = {name: t.detach() for name, t in state().items() if name not in ("tied", "turned", "part")}

    def parts(path: Path) -> dict[str, object]:
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        about = header.pop("__metadata__")
        about["DCP_SHARDING_INFO"] = json.loads(about["DCP_SHARDING_INFO"])
        content = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            assert first % max(1, tensors[name].itemsize) == 0
            content[name] = (entry["dtype"], entry["shape"], data[start + first : start + last])
        return {"about": about, **content}

    theirs = tmp_path / "theirs"
    with checkpoint_files.silence_warnings():
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(theirs), save_distributed=True))
    ours = checkpoint.save(tmp_path / "ours", step=1, tensors=tensors, values={}, score=None, keep_last=1)
    (their_file,), (our_file,) = theirs.glob("*.safetensors"), ours.glob("*.safetensors")
    assert their_file.name == our_file.name
    assert parts(their_file) == parts(our_file)


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read or written")

    for module, names in (
        (pickle, ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")),
        (torch, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    path = small(tmp_path)
    for name in ("evil.pkl", ".metadata", "model.distcp", "model.pt"):
        (path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    assert checkpoint.load(path, small_blank()) == VALUES
    assert {file.suffix for file in path.iterdir()} >= {".pkl", ".safetensors", ".json"}


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    path = small(tmp_path)
    files = sorted(path.iterdir())
    dice = random.Random(0)
    for _ in range(300):
        file = dice.choice(files)
        sound = file.read_bytes()
        location = dice.randrange(len(sound))
        file.write_bytes(sound[:location] + bytes([sound[location] ^ 1 << dice.randrange(8)]) + sound[location + 1 :])
        refusal(path)
        file.write_bytes(sound)
    checkpoint.load(path, small_blank())


def test_every_byte_of_the_commit_counts(tmp_path: Path) -> None:
    path = small(tmp_path, score=1.25)
    sound = (path / "COMMIT").read_bytes()
    for index in range(len(sound)):
        (path / "COMMIT").write_bytes(sound[:index] + bytes([sound[index] ^ 1 << index % 8]) + sound[index + 1 :])
        with pytest.raises(CheckpointError):
            checkpoint_folder.read_commit(path)


@pytest.mark.parametrize("pattern", ["*.safetensors", "state.json", "COMMIT"])
@pytest.mark.parametrize("change", ["empty", "half", "short", "long", "gone"])
@pytest.mark.long
def test_truncated_files_are_found(tmp_path: Path, pattern: str, change: str) -> None:
    older, path = small(tmp_path, 2), small(tmp_path, 3)
    (file,) = path.glob(pattern)
    data = file.read_bytes()
    file.write_bytes(
        {"empty": b"", "half": data[: len(data) // 2], "short": data[:-1], "long": data + b"x"}.get(change, b"")
    )
    if change == "gone":
        file.unlink()
    text = refusal(path)
    assert ("not committed" if (pattern, change) == ("COMMIT", "gone") else file.name) in text
    assert checkpoint.find_latest(tmp_path) == older


def test_a_foreign_shard_is_refused(tmp_path: Path) -> None:
    path, other = small(tmp_path / "a"), small(tmp_path / "b")
    (file,) = other.glob("*.safetensors")
    shutil.copy(file, path / "extra.safetensors")
    assert "extra.safetensors does not belong to it" in refusal(path)


def test_a_commit_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = small(tmp_path)
    outside = tmp_path / "secret"
    outside.write_text("x")
    entry = checkpoint_folder.record_file(outside)
    record = checkpoint_folder.FileRecord(name="../secret", size_bytes=entry.size_bytes, sha256=entry.sha256)
    checkpoint_folder.write_commit(
        path, checkpoint_folder.Commit(step=3, score=None, files=(*checkpoint_folder.read_commit(path).files, record))
    )
    assert "COMMIT is truncated or damaged" in refusal(path)


def test_commit_and_values_of_the_wrong_type_are_refused(tmp_path: Path) -> None:
    path = small(tmp_path)
    good = checkpoint_folder.read_commit(path)
    checkpoint_folder.write_commit(path, checkpoint_folder.Commit(step="3", score=None, files=good.files))  # type: ignore[arg-type]
    refusal(path)
    (path / "state.json").write_text("[]")
    files = (*(f for f in good.files if f.name != "state.json"), checkpoint_folder.record_file(path / "state.json"))
    checkpoint_folder.write_commit(path, checkpoint_folder.Commit(step=3, score=None, files=files))
    with pytest.raises(CheckpointError, match=r"has no state\.json"):
        checkpoint.read_values(path)


def test_hashes_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = small(tmp_path)
    listed = json.loads((path / "COMMIT").read_text())["files"]
    for file in path.iterdir():
        if file.name != "COMMIT":
            data = file.read_bytes()
            assert listed[file.name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_newer_format_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "COMMIT_FORMAT", 2)
        path = small(tmp_path)
    assert "format 2, this version reads up to 1: update meshwright" in refusal(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "step-000001")
    (tmp_path / "step-000001").mkdir()
    assert "not committed" in refusal(tmp_path / "step-000001")


def test_another_model_is_refused_by_its_first_tensor(tmp_path: Path) -> None:
    path = small(tmp_path)
    w, b = torch.zeros(4, 3), torch.zeros(3, dtype=torch.int64)
    assert "'w' is [4, 3] float32 there, [5, 3] float32 here" in refusal(path, {"w": torch.zeros(5, 3), "b": b})
    assert "'w' is [4, 3] float32 there, [4, 3] bfloat16 here" in refusal(path, {"w": w.bfloat16(), "b": b})
    assert "it has no 'v' ([2] float32 here)" in refusal(path, {"w": w, "v": torch.zeros(2), "b": b})
    assert "it has 'b' ([3] int64) too" in refusal(path, {"w": w})
    assert "it has no 'v'" in refusal(path, {"v": torch.zeros(2)}, subset=True)
    assert checkpoint.load(path, {"w": w}, subset=True) == VALUES
    assert w.unique().tolist() == [3.0]


def test_values_must_be_json(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), {1, 2}, torch.zeros(1)):
        with pytest.raises(CheckpointError, match="cannot be saved as JSON"):
            checkpoint.save(tmp_path, step=1, tensors={}, values={"x": bad}, score=None, keep_last=1)  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_what_is_no_plain_tensor_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"'w' cannot be saved: it is torch\.complex128"):
        checkpoint.save(tmp_path, step=1, tensors=tensors, values={}, score=None, keep_last=1)
    assert not list(tmp_path.iterdir())


def test_an_abort_while_saving_is_an_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's exception of many lines; the partial checkpoint is gone, the one before is there."""
    older = small(tmp_path, 1)

    def abort(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_files, "write_safetensors", abort)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [older]


def test_no_room_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = small(tmp_path, 1)
    real = checkpoint_files.pieces

    def full(tensor: Tensor) -> object:
        yield from real(tensor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "pieces", full)
    tensors = {"w": torch.zeros(2**20)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, step=2, tensors=tensors, values={}, score=None, keep_last=1)
    text = str(caught.value)
    assert "No space left on device; it needs 4.0 MiB and " in text and "free some space and resume" in text
    assert list(tmp_path.iterdir()) == [older]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, score in ((1, 5.0), (2, 3.0), (3, 4.0), (4, None), (5, 3.0), (6, float("nan"))):
        small(tmp_path, step, score, keep_last=2)
        assert checkpoint.find_latest(tmp_path) == tmp_path / f"step-{step:06d}"
    assert [(saved.step, saved.score) for saved in checkpoint.list_checkpoints(tmp_path)] == [
        (2, 3.0),
        (5, 3.0),
        (6, None),
    ]
    assert checkpoint.find_best(tmp_path) == tmp_path / "step-000002"
    assert len(list(tmp_path.iterdir())) == 3
    small(tmp_path, 7, 2.0, keep_last=1)
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [7]


def test_the_newest_is_that_of_the_last_step_and_not_of_the_last_name(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        small(tmp_path, step, None, keep_last=2)
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [1_000_000, 1_000_001]
    assert checkpoint.find_latest(tmp_path) == tmp_path / "step-1000001"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.none() | st.integers(0, 3).map(float), min_size=1, max_size=7), st.integers(1, 3))
def test_the_rule_of_keeping(tmp_path: Path, scores: list[float | None], keep_last: int) -> None:
    folder = tmp_path / str(random.random())
    for step, score in enumerate(scores, start=1):
        small(folder, step, score, keep_last=keep_last)
    scored = [(score, step) for step, score in enumerate(scores, start=1) if score is not None]
    newest = set(range(len(scores) - keep_last + 1, len(scores) + 1)) - set(range(-keep_last, 1))
    assert {s.step for s in checkpoint.list_checkpoints(folder)} == newest | ({min(scored)[1]} if scored else set())


def test_a_course_that_was_given_up_is_forgotten(tmp_path: Path) -> None:
    """Resumed from step 2 while 4 and 6 are there: resume=auto must not jump back to them later."""
    for step in (2, 4, 6):
        small(tmp_path, step, score=1 / step)
    small(tmp_path, 4, score=9.0)
    assert [(s.step, s.score) for s in checkpoint.list_checkpoints(tmp_path)] == [(2, 0.5), (4, 9.0)]
    assert checkpoint.find_best(tmp_path) == tmp_path / "step-000002"


def test_broken_ones_are_passed_over_with_a_warning_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [small(tmp_path, step, keep_last=2) for step in (1, 2)]
    (paths[1] / "state.json").unlink()
    assert checkpoint.find_latest(tmp_path) == paths[0]
    assert "step-000002: state.json is missing" in caplog.text
    assert [bool(saved.problem) for saved in checkpoint.list_checkpoints(tmp_path)] == [False, True]
    small(tmp_path, 3, keep_last=2)
    small(tmp_path, 4, keep_last=2)
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [2, 3, 4]
    shutil.rmtree(paths[1])
    assert checkpoint.find_latest(tmp_path / "nowhere") is None and checkpoint.find_best(tmp_path) is None


def test_leftovers_are_swept_and_a_committed_save_is_finished(tmp_path: Path) -> None:
    done = small(tmp_path, 1)
    torn, whole = tmp_path / ".saving-step-000002", tmp_path / ".saving-step-000003"
    shutil.copytree(done, torn)
    (torn / "COMMIT").unlink()
    shutil.copytree(done, whole)
    shutil.copytree(done, tmp_path / ".removing-1234-step-000000")
    assert checkpoint.find_latest(tmp_path) == done, "looking changes nothing"
    assert len(list(tmp_path.iterdir())) == 4
    checkpoint.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


def test_a_folder_that_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small(tmp_path, 1, keep_last=1)

    def busy(path: Path, **_: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder.shutil, "rmtree", busy)
        small(tmp_path, 2, keep_last=1)
    assert "cannot be deleted yet" in caplog.text
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path)] == [2]
    small(tmp_path, 3, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_the_checkpoint_before_survives_a_failed_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path, 3, score=1.0)
    real = Path.rename

    def stubborn(self: Path, target: Path) -> Path:
        if self.name.startswith(".saving-"):
            raise OSError(5, "Input/output error", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", stubborn)
    with pytest.raises(CheckpointError, match="Input/output error"):
        small(tmp_path, 3, score=2.0)
    assert [(saved.step, saved.score) for saved in checkpoint.list_checkpoints(tmp_path)] == [(3, 1.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
