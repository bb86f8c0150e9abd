"""Saved activations in host memory: on a CPU the second memory is a copy in the first, moved in the same order."""

import gc

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.model import Transformer
from meshwright.model.transformer import Block
from meshwright.observe.oracle.feature_matrix import CASE
from meshwright.observe.oracle.one_device import RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import on_one_device
from meshwright.parallel.axes.data import local
from meshwright.parallel.blocks.offload import Offload, StoredStorage
from meshwright.spec import Layout
from tests.counting import Alive
from tests.model.shrunk import KINDS, model, tokens
from tests.parallel.test_recompute import step


def laid_out(name: str, **fields: object) -> Transformer:
    dropout = float(fields.pop("dropout", 0.0))  # type: ignore[arg-type]
    return on_one_device(model(name, dropout=dropout), Layout(**fields)).model  # type: ignore[arg-type]


def offload_of(moving: Transformer) -> Offload:
    assert isinstance(moving.seams.call, Offload)
    return moving.seams.call


def free_bytes(moving: Transformer) -> int:
    return sum(buffer.memory.numel() for buffers in offload_of(moving).memory.free.values() for buffer in buffers)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("recompute", "layers"), [("none", 0), ("full", 0), ("full", 1), ("norms", 0), ("norms", 1)])
@pytest.mark.long
def test_loss_and_gradients_keep_every_bit(name: str, recompute: str, layers: int) -> None:
    """In the second step with the buffers of the first: none is taken anew, and all are free again after each."""
    plain = step(laid_out(name, dropout=0.1))
    moving = laid_out(name, recompute=recompute, recompute_layers=layers, offload="activations", dropout=0.1)
    taken = []
    for _ in range(2):
        for parameter in moving.parameters():
            parameter.grad = None
        seen = step(moving)
        assert seen.keys() == plain.keys()
        assert all(torch.equal(seen[key], value) for key, value in plain.items())
        assert free_bytes(moving) == offload_of(moving).memory.taken_bytes > 0
        taken.append(free_bytes(moving))
    assert taken[0] == taken[1]


def test_several_passes_in_flight_and_one_that_is_given_up() -> None:
    """As a pipeline has them: backward in another order than forward; buffers are shared and given back."""
    plain, moving = model("llama-3.1-8b"), laid_out("llama-3.1-8b", offload="activations")
    gradients: list[dict[str, Tensor]] = []
    for network in (plain, moving):
        losses = [network.loss(tokens(2, 20 + n)[:, :-1], tokens(2, 20 + n)[:, 1:]).cross_entropy for n in range(3)]
        losses[1].backward()  # type: ignore[no-untyped-call]
        losses[0].backward()  # type: ignore[no-untyped-call]
        del losses
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    gc.collect()
    assert all(torch.equal(gradients[1][name], value) for name, value in gradients[0].items())
    assert free_bytes(moving) == offload_of(moving).memory.taken_bytes > 0


def test_the_last_block_and_one_more_are_on_the_device() -> None:
    """Of what three blocks keep, one block's stays after the forward pass, the rest is in host memory."""
    live = {}
    for offload in ("off", "activations"):
        moving = laid_out("llama-3.1-8b", offload=offload)
        with Alive([*moving.parameters(), *moving.buffers()]) as alive:
            x, _ = moving.hidden(tokens(2, 48))
            live[offload] = alive.live_bytes
        host = 0 if offload == "off" else offload_of(moving).memory.taken_bytes
        live[offload] -= host
        del x
    per_layer = (313344 - 48384) / 3
    assert live["off"] - live["activations"] == pytest.approx(2 * per_layer, rel=0.15)


def test_norms_that_are_made_again_are_not_moved() -> None:
    """Their inputs are, once, whoever else keeps them; less is in host memory, and on the device only the last block's
    share of it more than nothing."""
    taken, live = {}, {}
    for recompute in ("none", "norms"):
        moving = laid_out("llama-3.1-8b", recompute=recompute, offload="activations")
        with Alive([*moving.parameters(), *moving.buffers()]) as alive:
            x, _ = moving.hidden(tokens(2, 48))
            taken[recompute] = offload_of(moving).memory.taken_bytes
            live[recompute] = alive.live_bytes - taken[recompute]
        del x
    hidden = 2 * 48 * model("llama-3.1-8b").shape.hidden * 4
    assert taken["none"] - taken["norms"] == 2 * 2 * hidden, "two norms in each of the two blocks that are moved"
    assert live["none"] - live["norms"] == 2 * hidden


def test_no_gradient_nothing_moved() -> None:
    moving = laid_out("llama-3.1-8b", offload="activations")
    with torch.no_grad():
        moving(tokens(1, 9))
    assert offload_of(moving).memory.taken_bytes == 0


def test_a_forward_pass_that_fails_keeps_no_buffer() -> None:
    """Nor does one whose loss is let go of; without a collection of cycles."""
    moving = laid_out("llama-3.1-8b", offload="activations")
    offload, last = offload_of(moving), moving.blocks[-1]
    inner = offload.inner

    def fails(block: Block, *arguments: object) -> tuple[Tensor, Tensor | None]:
        done = inner(block, *arguments)
        if block is last:
            raise RuntimeError("out of memory")
        return done

    gc.collect()
    gc.disable()
    try:
        offload.inner = fails
        try:
            moving(tokens(1, 9))
        except RuntimeError as failure:
            assert offload.memory.taken_bytes > 0 and "out of memory" in str(failure)
        assert not offload.leaving and free_bytes(moving) == offload.memory.taken_bytes
        offload.inner = inner
        made = moving(tokens(1, 9))
        assert free_bytes(moving) < offload.memory.taken_bytes
        del made
        assert free_bytes(moving) == offload.memory.taken_bytes
    finally:
        gc.enable()


RANKS = [
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    (2, {"tp": 2, "sp": True, "tp_chunks": 2}),
    (2, {"cp": 2, "zero": 1, "recompute": "full", "recompute_layers": 2}),
    (2, {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"}),
    (2, {"pp": 2, "vp": 2, "micro_batch": 1, "schedule": "dualpipe-v", "recompute": "full"}),
    (2, {"dp_shard": 2, "zero": 3, "recompute": "norms"}),
    (2, {"tp": 2, "sp": True, "recompute": "norms", "recompute_layers": 2}),
    (4, {"dp_shard": 4, "ep": 2, "zero": 3, "recompute": "norms"}),
    (4, {"dp_shard": 4, "ep": 2, "zero": 3}),
    (4, {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1, "micro_batch": 1}),
]


def _moved(layouts: list[Layout]) -> list[tuple[RankOutcome, set[int]]]:
    """What each layout computed, and the addresses of parameters' storages that were sent to host memory."""
    parameters: set[int] = set()
    sent: set[int] = set()

    class Watched(StoredStorage):
        def send(self, offload: Offload) -> None:
            assert self.on_device is not None
            blocks = offload.model.blocks
            now = {compat.storage_key(local(p).untyped_storage()) for block in blocks for p in block.parameters()}
            parameters.update(now)
            sent.update({compat.storage_key(self.on_device.untyped_storage())} & now)
            super().send(offload)

    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.parallel.blocks.offload.StoredStorage", Watched)
        for layout in layouts:
            sent.clear()
            outcomes.append((outcome(CASE, layout), set(sent)))
            assert parameters
    return outcomes


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.long
def test_every_parallelism_equals_one_device(world: int) -> None:
    """And no parameter is moved: what fully_shard gathers is freed behind the block's back."""
    layouts = [Layout(compile="off", offload="activations", **each) for size, each in RANKS if size == world]  # type: ignore[arg-type]
    ranks = on_ranks(world, _moved, layouts)
    for index, layout in enumerate(layouts):
        alone = outcome(CASE, Layout(compile="off", micro_batch=layout.micro_batch))
        assert (difference := first_difference(alone, [rank[index][0] for rank in ranks])) is None, (layout, difference)
        assert not any(rank[index][1] for rank in ranks), layout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own code
def test_around_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    plain = model("llama-3.1-8b")
    plain.hidden(tokens(2, 20))[0].sum().backward()
    moving = laid_out("llama-3.1-8b", offload="activations", compile="on")
    moving.hidden(tokens(2, 20))[0].sum().backward()
    for parameter, other in zip(moving.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert free_bytes(moving) == offload_of(moving).memory.taken_bytes > 0
