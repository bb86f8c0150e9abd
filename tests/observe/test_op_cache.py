"""Operations given again from memory: the same as torch gives, and the same dry run."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.observe.dryrun.op_cache import OpCache
from meshwright.observe.dryrun.rank_run import WatchedRank
from meshwright.observe.dryrun.simulate import watch_rank
from meshwright.observe.dryrun.storage_tracker import StorageWatch
from meshwright.observe.program import probe_counts
from meshwright.observe.ranks import SERVER
from meshwright.spec import Plan
from tests.observe.test_dryrun import MIXED, TINY, plan

PLANS = {
    "z3": plan(TINY, 6, dp_shard=2, zero=3, micro_batch=1, recompute="full"),
    "sp": plan(TINY, 4, tp=2, sp=True, micro_batch=2, recompute="selective", precision="bf16"),
    "cp": plan(TINY, 4, cp=2, micro_batch=2),
    "zb-v": plan(TINY, 8, pp=2, vp=2, micro_batch=1, schedule="zb-v"),
    "ep": plan(MIXED, 8, dp_shard=2, ep=2, zero=1, micro_batch=2),
}


class Counted(OpCache):
    """Tells how many operations torch was asked for."""

    asked = 0

    def call(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def ask(*arguments: Any, **keywords: Any) -> Any:
            self.asked += 1
            return operation(*arguments, **keywords)

        for name in ("namespace", "tags", "_opname"):
            setattr(ask, name, getattr(operation, name, None))
        self.wrapped = getattr(self, "wrapped", {})
        return super().call(self.wrapped.setdefault(operation, ask), args, kwargs)


@pytest.fixture
def counted() -> Iterator[Counted]:
    with compat.fake_tensors() as fake:
        maker = compat.fake_maker(fake)
        assert maker is not None
        made = Counted(maker)
        with StorageWatch(1, made.call):
            yield made


def _both(counted: Counted, function: Callable[..., Any], *like: Tensor) -> tuple[Any, Any, list[Tensor]]:
    """What function gives the first time and the second, of which torch knows nothing."""
    first = function(*(tensor.clone() for tensor in like))
    second_given = [tensor.clone() for tensor in like]
    before = counted.asked
    second = function(*second_given)
    assert counted.asked == before
    return first, second, second_given


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y,
        lambda x, y: x.t(),
        lambda x, y: x[1:, 2],
        lambda x, y: x.view(-1).unsqueeze(0),
        lambda x, y: torch.empty_strided((3, 5), (1, 3), dtype=torch.bfloat16),
        lambda x, y: x.to(torch.float64),
        lambda x, y: torch.cat([x, y.t()]),
        lambda x, y: x.sum(),
    ],
)
def test_a_result_is_the_same_again(counted: Counted, function: Callable[..., Any]) -> None:
    first, second, (x, y) = _both(counted, function, torch.empty(8, 4), torch.empty(4, 8))
    assert compat.are_alike(first, second)
    if first.untyped_storage().nbytes() == x.untyped_storage().nbytes() and function(x, y)._is_view():
        assert compat.storage_key(second.untyped_storage()) == compat.storage_key(x.untyped_storage())


def test_views_share_memory_and_what_is_changed_in_place_is_itself(counted: Counted) -> None:
    for function in (lambda x: x.transpose(0, 1), lambda x: x[2:], lambda x: x.chunk(2)[1], lambda x: x.add_(1)):
        _, second, (x,) = _both(counted, function, torch.empty(8, 4))
        assert compat.storage_key(second.untyped_storage()) == compat.storage_key(x.untyped_storage())
    assert second is x


def test_an_argument_given_twice_does_not_tell_which_comes_back(counted: Counted) -> None:
    x, y, z = (torch.empty(4, 4) for _ in range(3))
    assert torch.mul(x, y, out=x) is x
    assert torch.mul(x, y, out=z) is z


def test_sizes_strides_and_dtypes_tell_operations_apart(counted: Counted) -> None:
    assert (torch.empty(3, 4) + torch.empty(4)).shape == (3, 4)
    assert (torch.empty(5, 4) + torch.empty(4)).shape == (5, 4)
    assert (torch.empty(3, 4, dtype=torch.int64) + 1).dtype == torch.int64
    assert (torch.empty(3, 4, dtype=torch.int64) + 1.0).dtype == torch.float32
    assert torch.empty(3, 4).t().contiguous().stride() == (3, 1)
    assert torch.empty(4, 3).contiguous().stride() == (3, 1)


def test_memory_freed_in_place_is_not_filled_by_a_view(counted: Counted) -> None:
    x, y = torch.empty(16), torch.empty(16)
    x.view(4, 4)
    y.untyped_storage().resize_(0)
    with compat.real_tensors():
        assert y.untyped_storage().nbytes() == 0
    before = counted.asked
    y.view(4, 4)
    assert counted.asked == before + 1


def test_an_error_comes_every_time(counted: Counted) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.empty(3, 4) @ torch.empty(3, 4)


def _seen(job: Plan, remembers: bool) -> WatchedRank:
    if not remembers:
        OpCache.call = lambda self, operation, args, kwargs: operation(*args, **kwargs)  # type: ignore[method-assign]
    rank = job.layout.world - 1
    return watch_rank(job, rank, "cuda", 1.0, probe_counts(job, rank))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_dry_run_is_the_same_to_the_byte(name: str) -> None:
    with ProcessPoolExecutor(1, mp_context=SERVER, max_tasks_per_child=1) as pool:
        remembered, asked = [pool.submit(_seen, PLANS[name], told).result() for told in (True, False)]
    assert remembered == asked
