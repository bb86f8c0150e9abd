"""benchmarks/bytes_moved.py: bytes of single operators by arithmetic, and what fusion saves in a small step."""

import pytest
import torch

from benchmarks.bytes_moved import Counting, step_bytes


def test_an_operator_reads_its_inputs_and_writes_its_answer_once() -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    table, places = torch.ones(1000, 8), torch.tensor([1, 2])
    with Counting().counting() as counted:
        product = a @ b
        product.add_(1.0)
        torch.nn.functional.embedding(places, table)
        product.view(4, 8).transpose(0, 1)
    assert counted.moved["mm"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert counted.moved["add_"] == 4 * 2 * 8 * 4
    assert counted.moved["embedding"] == 4 * 2 * (2 * 8)  # the rows that are picked, not the table
    assert set(counted.moved) == {"mm", "add_", "embedding"}


@pytest.mark.long
def test_plain_kernels_move_the_scores_and_fused_ones_do_not() -> None:
    """At 256 positions the S x S tensors of six layers of eight heads are 4 x 256^2 bytes per head."""
    plain, fused = (step_bytes("10m", kernels, 1, 256) for kernels in ("reference", "auto"))
    assert plain.moved["_softmax"] > 0 and not fused.moved["_softmax"]
    assert fused.moved.total() < plain.moved.total()
