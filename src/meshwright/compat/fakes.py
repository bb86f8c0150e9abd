"""torch's fake tensors and fake worlds: private names of it, each with its reason."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A process group of so many ranks in which this process is one and the others do not exist: collectives return at
    once and leave tensors as they are.

    torch keeps its fake backend with its tests. It also remembers what DTensor operations give, on meshes that count
    as equal when their ranks are: forgotten here, since the mesh of another rank has that rank's groups.
    """
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with _padded_once():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _padded_once() -> Iterator[None]:
    """FSDP pads a short shard when it makes it, and again when the first pass begins, unless the memory is still the
    same: it goes by the address, which fake tensors do not have. Without this a dry run counts the first copy, too,
    which the optimizer's list of masters keeps."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    pad: Callable[[Any], None] = FSDPParam.reset_sharded_param

    def pad_changed(held: Any) -> None:
        now = getattr(held._module_info.module, held._module_info.param_name)
        same = now is held.sharded_param and is_fake(held._sharded_param_data)
        keys = (storage_key(x.untyped_storage()) for x in (held._sharded_param_data, now._local_tensor))
        if not same or len(set(keys)) > 1:
            pad(held)

    setattr(FSDPParam, "reset_sharded_param", pad_changed)  # noqa: B010  # as its type has it, it cannot be assigned
    try:
        yield
    finally:
        setattr(FSDPParam, "reset_sharded_param", pad)  # noqa: B010  # the same


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that live; two Python objects may stand for one. The address of its memory
    would not do: fake ones have none."""
    return int(storage._cdata)


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors have sizes and no values. torch's FakeTensorMode has no public name yet (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def lies_in_memory(*tensors: torch.Tensor) -> bool:
    """Whether their numbers are where `data_ptr` says, as they are, so that a C loop may read them in torch's stead.
    Fake tensors count as those they stand for, and so does what is compiled.

    Subclasses with operations of their own (DTensor) keep numbers elsewhere, torch.func's wrappers and zero tensors
    nowhere, and those with the negative bit the other way round. A tracer would miss the loop, and forward-mode
    differentiation its derivative.
    """
    if torch.compiler.is_compiling():
        return True
    if torch.jit.is_tracing() or torch.autograd.forward_ad._current_level >= 0 or _traces():
        return False
    plain = torch.Tensor.__torch_dispatch__
    return all(is_fake(x) or (type(x).__torch_dispatch__ is plain and _is_stored(x)) for x in tensors)


def _is_stored(x: torch.Tensor) -> bool:
    return not (torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_neg() or x._is_zerotensor())


def _traces() -> bool:
    """Whether make_fx records operations."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


class FakeMaker:
    """Makes fake tensors as a mode of them would, in a tenth of the time.

    FakeTensor's constructor checks and normalizes its arguments and sets a dozen attributes one by one; here they are
    taken from one that it made.
    """

    def __init__(self, mode: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self.mode, self.kind = mode, FakeTensor
        self._states: dict[torch.device, dict[str, Any]] = {}

    def below(self) -> AbstractContextManager[Any]:
        """Inside, operations pass by all modes."""
        found: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
        return found

    def fresh(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor with memory of its own."""
        with self.below():
            return self._over(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), device)

    def view(
        self, storage: torch.UntypedStorage, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...],
        dtype: torch.dtype, device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """A tensor in the memory of another one."""
        with self.below():
            empty = torch.empty(0, dtype=dtype, device="meta")
            empty.set_(storage, offset, sizes, strides)
            return self._over(empty, device)

    def _over(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        state = self._states.get(device)
        if state is None:
            state = self._states[device] = dict(self.kind(self.mode, meta.new_empty(0), device).__dict__)
        made: torch.Tensor = torch.Tensor._make_subclass(
            self.kind, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(state)
        return made


def fake_maker(mode: Any) -> FakeMaker | None:
    """What makes fake tensors for a mode that is entered; None where this torch makes them in another way."""
    try:
        maker = FakeMaker(mode)
        made = maker.fresh((2, 3), (3, 1), torch.float32, torch.device("cpu"))
        seen = maker.view(made.untyped_storage(), 1, (2,), (1,), torch.float32, torch.device("cpu"))
        whole = torch.empty(2, 3, dtype=torch.float32, device="cpu")
        return maker if alike(made, whole) and alike(seen, whole.view(-1)[1:3]) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors are the same to torch: sizes, memory, attributes, and what is called for their kind."""
    with torch._C._DisableTorchDispatch():
        sizes = [(x.shape, x.stride(), x.dtype, x.storage_offset(), x.layout, x.is_neg(), x.is_conj()) for x in (a, b)]
    return (
        sizes[0] == sizes[1]
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and a.__dict__ == b.__dict__
        and torch._C._dispatch_key_set(a) == torch._C._dispatch_key_set(b)
    )


def data_dependent() -> tuple[type[Exception], ...]:
    """What torch raises where a fake tensor's value is asked for."""
    from torch._subclasses import fake_tensor

    names = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException")
    return tuple(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))
