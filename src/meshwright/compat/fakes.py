"""torch's fake tensors and fake process groups: private names, each with its reason."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Create a process group of `world` ranks of which only this process exists.

    Collectives return at once and leave tensors unchanged. torch ships its fake backend with its tests. It also caches
    the results of DTensor operations by mesh, and meshes of equal ranks compare equal. That cache is cleared here,
    since the mesh of another rank has that rank's groups.
    """
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with _pad_once():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _pad_once() -> Iterator[None]:
    """Keep FSDP from padding a fake shard twice inside `with`.

    FSDP pads a short shard when it is created, and again before the first pass unless the memory is unchanged. It
    compares addresses, which fake tensors lack. A dry run would count the first copy too, which the optimizer's masters
    keep alive.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    pad: Callable[[Any], None] = FSDPParam.reset_sharded_param

    def pad_changed(held: Any) -> None:
        # The module's parameter may have been replaced since, by a load or a cast.
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
    """Return an id that distinguishes a storage from all others alive. Fake storages have no address."""
    return int(storage._cdata)


def fake_tensors() -> AbstractContextManager[Any]:
    """Make all tensors created inside `with` fake. FakeTensorMode has no public name yet (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def has_own_memory(x: torch.Tensor) -> bool:
    """Return whether nothing else holds the memory of a tensor: it is no view, and no other tensor shares it."""
    # Two hold it: the tensor, and the Python object that is asked.
    return not x._is_view() and torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2


def is_fake(x: torch.Tensor) -> bool:
    """Return whether a tensor has no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def lies_in_memory(*tensors: torch.Tensor) -> bool:
    """Return whether a C loop may read the numbers of these tensors at their `data_ptr`.

    Fake tensors and compiled code count as the tensors they stand for. Subclasses with operations of their own
    (DTensor) store numbers elsewhere, torch.func's wrappers and zero tensors store none, and tensors with the negative
    bit store the opposite. A tracer would miss the loop, and forward-mode differentiation its derivative.
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
    """Return whether make_fx is recording operations."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


class FakeMaker:
    """Creates fake tensors of a mode in a tenth of the time.

    FakeTensor's constructor checks and normalizes its arguments and sets a dozen attributes. Here these are copied from
    one tensor that it created.
    """

    def __init__(self, mode: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self.mode, self.kind = mode, FakeTensor
        self._states: dict[torch.device, dict[str, Any]] = {}

    def below(self) -> AbstractContextManager[Any]:
        """Bypass all dispatch modes inside `with`."""
        guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
        return guard

    def fresh(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Create a tensor with memory of its own."""
        with self.below():
            return self._over(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), device)

    def view(
        self, storage: torch.UntypedStorage, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...],
        dtype: torch.dtype, device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """Create a tensor in the memory of another."""
        with self.below():
            empty = torch.empty(0, dtype=dtype, device="meta")
            empty.set_(storage, offset, sizes, strides)
            return self._over(empty, device)

    def _over(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        state = self._states.get(device)
        if state is None:
            state = self._states[device] = dict(self.kind(self.mode, meta.new_empty(0), device).__dict__)
        tensor: torch.Tensor = torch.Tensor._make_subclass(
            self.kind, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        # As FakeTensor's constructor does: a kernel that asks for the address must fail, not write.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__dict__.update(state)
        return tensor


def fake_maker(mode: Any) -> FakeMaker | None:
    """Return a FakeMaker for an active mode, or None if this torch builds fake tensors differently."""
    try:
        # A trial against tensors that the mode makes itself: sizes, memory, attributes and dispatch keys must agree.
        maker = FakeMaker(mode)
        tensor = maker.fresh((2, 3), (3, 1), torch.float32, torch.device("cpu"))
        part = maker.view(tensor.untyped_storage(), 1, (2,), (1,), torch.float32, torch.device("cpu"))
        whole = torch.empty(2, 3, dtype=torch.float32, device="cpu")
        return maker if are_alike(tensor, whole) and are_alike(part, whole.view(-1)[1:3]) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether torch treats two fake tensors alike: sizes, memory, attributes and dispatch keys."""
    with torch._C._DisableTorchDispatch():
        sizes = [(x.shape, x.stride(), x.dtype, x.storage_offset(), x.layout, x.is_neg(), x.is_conj()) for x in (a, b)]
    return (
        sizes[0] == sizes[1]
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and a.__dict__ == b.__dict__
        and torch._C._dispatch_key_set(a) == torch._C._dispatch_key_set(b)
    )


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch raises when the value of a fake tensor is needed."""
    from torch._subclasses import fake_tensor

    names = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException")
    return tuple(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))
