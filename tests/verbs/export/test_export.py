"""Export of checkpoints of many ranks: the bytes of one process' export, without the whole model in memory."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.formats.hub import export_folder
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape, Recipe, num_parameters
from meshwright.store import checkpoint, checkpoint_files, checkpoint_folder
from meshwright.store.model_weights import MASTER, weights
from meshwright.store.saver import Piece
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.state import Progress, TrainState
from tests.store import saving

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2-124m", "bf16", {"pp": 2, "tp": 2}),
    ("llama-3.1-8b", "fp32", {"dp_shard": 4, "zero": 3}),
    ("qwen3-30b-a3b", "bf16", {"dp_shard": 2, "tp": 2, "sp": True, "ep": 4, "zero": 2}),
    ("deepseek-v3", "bf16", {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1}),
]
"""A tied head on both ends of a pipeline and fused projections; uneven shards; experts over other ranks than the rest;
latent attention and a router's correction."""
LARGE = ModelShape(vocab=2048, layers=8, hidden=512, heads=8, kv_heads=8, ffn=1408, max_positions=64)
"""106 MiB in fp32, three times that with its moments; no tensor above 4 MiB."""
RUN_BYTES = 4 * 2**20


def save(
    folder: Path, shape: ModelShape, precision: str, layout: Layout, process_groups: ProcessGroups | None = None
) -> None:
    """Save the state of a training under a layout, every tensor filled by its name."""
    mesh = make_mesh(layout, process_groups=process_groups)
    engine = build_engine(shape, layout, mesh=mesh, dtype=DTYPES[precision], device=torch.device("cpu"), seed=0)
    state = TrainState(engine, Optimizer(engine.parameters.items(), Recipe()), None, Progress())
    tensors = {name: tensor for name, tensor in state.tensors().items() if not name.startswith("rng.")}
    with torch.no_grad():
        for name, tensor in tensors.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.rand(tensor.shape, generator=generator)
            held, part = (tensor.held, whole[tensor.box.slices]) if isinstance(tensor, Piece) else (tensor, whole)
            held.copy_(part)
    checkpoint.save(folder, step=1, tensors=tensors, values={}, score=None, keep_last=1)


def save_cases(folder: str) -> None:
    """Save all cases, on one of four ranks."""
    process_groups: ProcessGroups = {}
    for name, precision, options in CASES:
        save(Path(folder, name), shrink(name), precision, Layout(compile="off", **options), process_groups)


def save_large(folder: str) -> None:
    """Save the large model on one of four ranks: tensor parallelism within stages, sharded moments."""
    save(Path(folder), LARGE, "fp32", Layout(compile="off", tp=2, dp_shard=2, zero=1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    on_ranks(4, save_cases, str(folder))
    return folder


def directory(out: Path, shape: ModelShape, source: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the files of an export."""
    export_folder(out, model_tensors=weights(source, dtype), shape=shape, tokenizer=None, dtype=dtype)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("dtype", ["as trained", "fp32"])
@pytest.mark.parametrize(("name", "precision"), [case[:2] for case in CASES])
def test_any_layout_exports_the_bytes_of_one_process(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str, dtype: str
) -> None:
    monkeypatch.setattr(checkpoint_files, "RUN_BYTES", 3000)
    wanted = DTYPES[precision if dtype == "as trained" else dtype]
    save(tmp_path / "one", shrink(name), precision, Layout(compile="off"))
    alone = directory(tmp_path / "a", shrink(name), tmp_path / "one" / "step-000001", wanted)
    four = directory(tmp_path / "b", shrink(name), saved / name / "step-000001", wanted)
    assert alone.keys() == four.keys() and alone == four
    kinds = checkpoint.names(saved / name / "step-000001")
    assert any(kind.startswith(MASTER) for kind in kinds) == (precision != "fp32")


def test_the_files_of_a_checkpoint_are_hashed_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "RUN_BYTES", 3000)
    real, seen = checkpoint_folder.record_file, []
    monkeypatch.setattr(checkpoint_folder, "record_file", lambda path: (seen.append(path.name), real(path))[1])
    source = saved / "llama-3.1-8b" / "step-000001"
    assert len(list(weights(source, torch.float32))) > 20
    assert sorted(seen) == sorted(path.name for path in source.iterdir() if path.name != checkpoint_folder.COMMIT)


def test_a_missing_name_and_a_damaged_file_are_refused(saved: Path, tmp_path: Path) -> None:
    source = saved / "llama-3.1-8b" / "step-000001"
    with pytest.raises(checkpoint.CheckpointError, match=r"has no 'model\.other'"):
        list(checkpoint.stream(source, ["model.other"]))
    save(tmp_path, shrink("llama-3.1-8b"), "fp32", Layout(compile="off"))
    file = next((tmp_path / "step-000001").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="damaged or tampered"):
        next(weights(tmp_path / "step-000001", torch.float32))


def measure_export(source: Path, out: Path, report: Path) -> None:
    """Measure, in a process of its own, the peak memory of exports, streamed and not."""
    peaks = {}
    for name, run_bytes in (("streamed", RUN_BYTES), ("at once", 2**40)):
        checkpoint_files.RUN_BYTES = run_bytes
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        tensors = weights(source, torch.float32)
        export_folder(out / name, model_tensors=tensors, shape=LARGE, tokenizer=None, dtype=torch.float32)
        peaks[name] = _status("VmHWM") - before
    report.write_text(json.dumps(peaks))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to see the peak")
@pytest.mark.long
def test_an_export_never_holds_the_model(tmp_path: Path) -> None:
    on_ranks(4, save_large, str(tmp_path / "saved"))
    source = tmp_path / "saved" / "step-000001"
    assert saving.finish(saving.start(measure_export, source, tmp_path, tmp_path / "report")) == [0]
    document: dict[str, int] = json.loads((tmp_path / "report").read_text())
    model_bytes = 4 * num_parameters(LARGE)
    assert document["streamed"] < model_bytes / 3 < model_bytes < document["at once"]
    first, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in document)
    assert first == other
