"""Two Gloo processes save shards, any layout loads them: what the parallel engine stands on."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.spec.errors import CheckpointError
from meshwright.store import checkpoint, checkpoint_files
from tests.store import saving

SHAPES = {"even": (4, 6), "uneven": (5, 3), "narrow": (1, 8), "empty": (0, 3), "deep": (3, 4, 5)}


def whole() -> dict[str, Tensor]:
    torch.manual_seed(1)
    actual = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return actual | {"half": torch.randn(7, 2).bfloat16(), "scalar": torch.tensor(2.5)}


def laid_out(tensors: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Sharded along `dim` where a tensor has it, else on every rank whole; `even` is replicated, `scalar` plain."""
    mesh = init_device_mesh("cpu", (2,))
    actual: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        placement = Shard(dim) if tensor.ndim > dim and name != "even" else Replicate()
        actual[name] = tensor if name == "scalar" else distribute_tensor(tensor, mesh, [placement])
    return actual


def assert_equal(tensors: dict[str, Tensor]) -> None:
    for name, expected in whole().items():
        tensor = tensors[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected), name


def save_and_reload(rank: int, folder: Path) -> None:
    """Each rank has a stage of its own besides; then the same under another layout, and what one process saved."""
    ours = {f"stage{rank}.w": torch.full((3,), float(rank)), f"rng.{rank}.torch": torch.tensor([rank])}
    tensors = laid_out(whole(), 0) | ours
    path = checkpoint.save(folder / "two", step=1, tensors=tensors, values={"rank": rank}, score=None, keep_last=1)
    assert path.is_dir()
    for source, mine in ((path, ours), (folder / "one" / "step-000005", {})):
        for dim in (0, 1):
            fresh = laid_out({name: torch.zeros_like(t) for name, t in whole().items()}, dim)
            stage = {name: torch.full_like(t, -1) for name, t in mine.items()}
            checkpoint.load(source, fresh | stage)
            assert_equal(fresh)
            assert all(torch.equal(stage[name], mine[name]) for name in stage)
    other = laid_out({name: torch.zeros_like(t) for name, t in whole().items()}, 0)
    with pytest.raises(CheckpointError, match=r"it has 'stage0\.w' \(\[3\] float32\) too"):
        checkpoint.load(path, other)


def fail_together(rank: int, folder: Path) -> None:
    """The disk of rank 1 is full, then a shard is damaged: both ranks hear of it, none waits."""
    tensors = laid_out(whole(), 0)
    checkpoint.save(folder / "two", step=1, tensors=tensors, values={}, score=None, keep_last=1)
    real = checkpoint_files.write_safetensors

    def full(*inputs: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoint_files.write_safetensors = full if rank else real  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(folder / "two", step=2, tensors=tensors, values={}, score=None, keep_last=1)
    checkpoint_files.write_safetensors = real
    torch.distributed.barrier()
    assert [path.name for path in (folder / "two").iterdir()] == ["step-000001"]
    path = folder / "two" / "step-000001"
    file = max(path.glob("*.safetensors"))
    torch.distributed.barrier()
    if rank == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="damaged or tampered with"):
        checkpoint.load(path, tensors)


def test_saved_on_two_ranks_loaded_anywhere(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", step=5, tensors=whole(), values={}, score=None, keep_last=1)
    assert saving.ranks(save_and_reload, tmp_path) == [0, 0]
    path = checkpoint.find_latest(tmp_path / "two")
    assert path is not None
    files = json.loads((path / "COMMIT").read_text())["files"]
    assert {name[:11] for name in files} == {"shard-00001", "shard-00002", "state.json"}
    fresh = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    fresh |= {"stage0.w": torch.zeros(3), "stage1.w": torch.zeros(3), "rng.1.torch": torch.zeros(1, dtype=torch.int64)}
    assert checkpoint.load(path, fresh) == {"rank": 0}
    assert_equal(fresh)
    assert fresh["stage1.w"].tolist() == [1.0] * 3 and fresh["rng.1.torch"].tolist() == [1]


def test_ranks_fail_together(tmp_path: Path) -> None:
    assert saving.ranks(fail_together, tmp_path) == [0, 0]
