"""Layout: degrees, and the equation global batch = micro-batch x accumulation x dp."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import Layout, MoEShape
from meshwright.spec.errors import IllegalLayout

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp")


@pytest.mark.parametrize("field", DEGREES)
def test_degrees_are_at_least_one(field: str) -> None:
    with pytest.raises(IllegalLayout, match=f"layout.{field}=0 must be at least 1"):
        Layout(**{field: 0})


def test_micro_batch_is_not_negative() -> None:
    with pytest.raises(IllegalLayout, match=r"layout.micro_batch=-1"):
        Layout(micro_batch=-1)


def pieces(layout: Layout, rows: int, experts: int = 16, ffn: int = 64, device: str = "cuda") -> int:
    return layout.ep_pieces(rows, 1024, MoEShape(experts=experts, top_k=1, ffn=ffn), device)


def test_pieces_of_what_travels_to_experts() -> None:
    """2^24 elements each at the least; as many as divide a rank's experts; none where gradients of weights wait, or
    where experts have few rows."""
    with pytest.raises(IllegalLayout, match=r"layout.ep_chunks=-1"):
        Layout(ep_chunks=-1)
    spread, split = Layout(ep=2, dp_shard=2), Layout(ep=2, dp_shard=2, pp=2, schedule="zb-h1")
    assert [pieces(spread, rows) for rows in (16384, 32768, 65536, 2**20)] == [1, 2, 4, 4]
    assert [pieces(spread, 2**20, experts) for experts in (2, 4, 6, 8, 12)] == [1, 2, 1, 4, 2]
    assert pieces(spread, 2**20, device="cpu") == pieces(split, 2**20) == pieces(Layout(), 2**20) == 1
    assert [pieces(spread, 2**16, ffn=ffn) for ffn in (10240, 10241)] == [4, 1]
    far = Layout(ep=16, dp_shard=16)
    assert [pieces(far, 2**16, 64, ffn) for ffn in (64, 16384, 2**19)] == [2, 2, 1]
    assert pieces(Layout(ep=2, dp_shard=2, ep_chunks=3), 8, 6, device="cpu") == 3


def test_a_stage_has_a_layer() -> None:
    with pytest.raises(IllegalLayout, match=r"layout.stages=\[2, 0\]: each stage has at least 1 layer"):
        Layout(pp=2, stages=(2, 0))


def test_ranks() -> None:
    layout = Layout(dp_replicate=2, dp_shard=4, tp=8, cp=2, pp=3, ep=8, vp=2)
    assert layout.dp == 8
    assert layout.world == 8 * 8 * 2 * 3


@given(dp=st.integers(1, 64), micro_batch=st.integers(1, 64), accumulation=st.integers(1, 64))
def test_the_equation(dp: int, micro_batch: int, accumulation: int) -> None:
    layout = Layout(dp_shard=dp, micro_batch=micro_batch)
    assert layout.micro_batches(dp * micro_batch * accumulation) == accumulation
    assert layout.micro_batch_of(dp * micro_batch * accumulation) == micro_batch


@given(dp=st.integers(1, 64), per_rank=st.integers(1, 64))
def test_zero_means_all_at_once(dp: int, per_rank: int) -> None:
    layout = Layout(dp_replicate=dp)
    assert (layout.micro_batch_of(dp * per_rank), layout.micro_batches(dp * per_rank)) == (per_rank, 1)


@given(dp=st.integers(1, 16), micro_batch=st.integers(0, 16), global_batch=st.integers(1, 500))
def test_it_divides_or_names_a_batch_that_does(dp: int, micro_batch: int, global_batch: int) -> None:
    layout = Layout(dp_replicate=dp, micro_batch=micro_batch)
    try:
        count = layout.micro_batches(global_batch)
    except IllegalLayout as error:
        assert f"recipe.global_batch={global_batch} " in str(error)
        layout.micro_batches(int(str(error).rpartition("=")[2]))
    else:
        assert count * layout.micro_batch_of(global_batch) * dp == global_batch


def test_a_small_batch_caps_the_micro_batch() -> None:
    """A ramp may begin below micro_batch."""
    assert Layout(micro_batch=8).micro_batch_of(2) == 2
    assert Layout(micro_batch=8).micro_batches(2) == 1
