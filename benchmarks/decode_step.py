"""What a decode step of the serving engine launches on a GPU, counted on tensors without values: no GPU is needed.

    python -m benchmarks.decode_step [--model llama-3.1-8b] [--device h200-sxm] [--context 1024] [--json]

The engine's own step runs on fake CUDA tensors, as a graph captures it. Every operation of torch that is a kernel there
counts as one launch, every Triton kernel as the launches that it makes; bytes are what a kernel reads and writes at
least. Host operations are all that is dispatched, views included, and calls of this package's Python functions.

Times are predictions by the planner's kernel curves: products and attention as measured elsewhere on such a device,
every other kernel by its bytes beside a launch. A prediction says nothing about what a compiler made of a kernel.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright
from meshwright import compat
from meshwright.kernels import chooser
from meshwright.kernels.attention.paged import RowsCall
from meshwright.model.quantized_weights import put_quantized, quantizable
from meshwright.model.transformer import Transformer, shrink, skeleton
from meshwright.planner.serving.deployment import BF16, LAUNCH_US, formats_of
from meshwright.planner.serving.device_kernels import DeviceKernels
from meshwright.serving.engine.cache.paged_cache import PagedCache, StepPlaces
from meshwright.serving.engine.rows.prepared_layers import PreparedLayers
from meshwright.spec import presets
from meshwright.spec.layout.cluster import Device
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.execution import position_numbers

FORMS = ("bf16", "int4-rtn", "nf4", "int8", "fp8")
BATCHES = (1, 64)
BLOCK = 16
PROCESSORS = {90: 132, 80: 108}
VIEWS = (
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "lift_fresh", "new_empty", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view",
)  # fmt: skip
"""Operations of torch that launch nothing."""
WAITS = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "repeat_interleave", "_unique2")
PRODUCTS = ("mm", "addmm", "bmm", "linear", "_scaled_mm")


@dataclass(slots=True)
class Launch:
    """One kernel: its name, and what it reads and writes at least."""

    name: str
    read_bytes: int
    written_bytes: int
    product: tuple[int, int, int] | None = None
    """(m, k, n) of a product of rows with a matrix."""


@dataclass(slots=True)
class StepCounts:
    """A decode step."""

    launches: list[Launch] = field(default_factory=list)
    dispatches: int = 0
    """Operations of torch, views included, and Triton kernels."""
    calls: int = 0
    """Of Python functions of this package."""
    waits: list[str] = field(default_factory=list)
    """Operations for which the host waits, or which copy numbers of the host: no graph can hold them."""

    @property
    def read_bytes(self) -> int:
        """By all kernels."""
        return sum(launch.read_bytes for launch in self.launches)

    @property
    def written_bytes(self) -> int:
        """By all kernels."""
        return sum(launch.written_bytes for launch in self.launches)

    @property
    def by_name(self) -> Counter[str]:
        """Launches of each kernel."""
        return Counter(launch.name for launch in self.launches)


class Counting(TorchDispatchMode):
    """Counts operations of torch on fake CUDA tensors."""

    def __init__(self, counts: StepCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name == "device":  # of a tensor that is asked where it is
            return out
        self.counts.dispatches += 1
        if name in WAITS:
            self.counts.waits.append(name)
        if name in VIEWS:
            return out
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.device.type == "cuda"]
        made = [tensor for tensor in _tensors(out) if tensor.device.type == "cuda"]
        if inputs or made:
            product = None
            if name in PRODUCTS:
                left, right = [tensor for tensor in inputs if tensor.dim() == 2][:2]
                product = (left.shape[0], left.shape[1], right.shape[1])
            written = [args[0]] if not made or name.endswith("_") else made
            if name == "index_copy_":
                written, inputs = [args[3]], [args[3]]
            elif name in ("embedding", "index_select", "gather"):
                inputs = made
            self.counts.launches.append(Launch(name, _bytes(inputs), _bytes(written), product))
        return out


class WithoutDriver(TorchFunctionMode):
    """Indexes fake CUDA tensors where torch was built without CUDA: its own indexing asks for the device first."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            return _indexed(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if function in ALONE:
            return ALONE[function](*args)
        return function(*args, **(kwargs or {}))


ALONE = {Tensor.copy_: torch.ops.aten.copy_.default, Tensor.__invert__: torch.ops.aten.bitwise_not.default}
"""Methods that ask for the device first, and the operation that each is."""


def _indexed(x: Tensor, places: tuple[Any, ...]) -> Tensor:
    if Ellipsis in places:
        before = places.index(Ellipsis)
        places = (*places[:before], *[slice(None)] * (x.dim() - len(places) + 1), *places[before + 1 :])
    dim = 0
    for position in places:
        if position is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(position, int):
            x = x.select(dim, position)
        elif isinstance(position, slice):
            x, dim = torch.ops.aten.slice(x, dim, position.start, position.stop, position.step or 1), dim + 1
        else:
            x, dim = x.index_select(dim, position), dim + 1
    return x


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _tensors(branch)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _triton_bytes(kernel: Any, names: dict[str, Any], context: int) -> tuple[int, int]:
    """Read and written by one launch: tensors as far as they are looked at."""
    name, tensors = kernel.__name__, {key: tensor for key, tensor in names.items() if isinstance(tensor, Tensor)}
    written = {key: tensor for key, tensor in tensors.items() if key in WRITTEN.get(name, ("out",))}
    read = {key: tensor for key, tensor in tensors.items() if key not in written}
    if name in IN_PLACES:
        rows = names["last" if "last" in names else "slots"].shape[0]
        positions = rows * context if name == "paged_rows" else rows
        stores = [tensor for key, tensor in tensors.items() if key in STORES]
        each = sum(tensor.shape[2:].numel() * tensor.element_size() for tensor in stores)
        read = {key: tensor for key, tensor in read.items() if key not in STORES}
        written = {key: tensor for key, tensor in written.items() if key not in STORES}
        stored_bytes = positions * each
        if name == "paged_rows":
            return _distinct(read) + stored_bytes, _distinct(written)
        return _distinct(read), _distinct(written) + stored_bytes
    return _distinct(read), _distinct(written)


STORES = ("keys", "values", "key_scales", "value_scales")
WRITTEN = {
    "root_norm_forward": ("out", "total", "scales"), "rotate_rows": ("q_out", "k_out"), "paged_rows": ("out", "lse"),
    "round_rows": ("codes", "scales"), "keep_rows": ("q", "k", *STORES),
}  # fmt: skip
IN_PLACES = ("paged_rows", "keep_rows")


def _distinct(tensors: dict[str, Tensor]) -> int:
    """Of tensors, each once: a kernel that needs none of something is given another one in its stead."""
    seen = {id(tensor): tensor for tensor in tensors.values()}
    return _bytes(list(seen.values()))


@contextmanager
def fake_gpu(counts: StepCounts, context: int, capability: int = 90) -> Iterator[None]:
    """Inside, kernels are chosen as on a GPU, and Triton's launches are counted in place of being made."""
    from triton.runtime.jit import JITFunction

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        counts.dispatches += 1
        product = None
        if kernel.__name__ in ("packed_rows", "int8_rows"):
            product = (names["rows"], names["inner"], names["columns"])
        elif kernel.__name__ == "few_packed_rows":
            product = (names["ROWS"], names["inner"], names["columns"])
        elif kernel.__name__ == "few_int8_rows":
            product = (names["rows"], 4 * names["words"], names["columns"])
        counts.launches.append(Launch(kernel.__name__, *_triton_bytes(kernel, names, context), product))

    def choose(operation: str, device: torch.device, dtype: torch.dtype, prefer: str, feature: str) -> Any:
        rule = chooser.RULES[operation]
        triton = rule.auto and not feature and dtype in rule.dtypes
        return chooser.Implementation(operation, "triton" if triton else "torch", "counted")

    changed: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", launch), (chooser, "_choose", choose), (chooser, "_choices", {}),
        (torch.cuda, "get_device_capability", lambda _=None: divmod(capability, 10)),
        (torch.cuda, "get_device_properties", lambda _=None: _Properties(PROCESSORS[capability])),
        (torch.cuda, "is_available", lambda: True),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name, _ in changed]
    for owner, name, new in changed:
        setattr(owner, name, new)
    compat.processors.cache_clear()
    try:
        yield
    finally:
        for (owner, name, _), old in zip(changed, before, strict=True):
            setattr(owner, name, old)
        compat.processors.cache_clear()


@dataclass(frozen=True, slots=True)
class _Properties:
    multi_processor_count: int


def fake_model(shape: ModelShape, form: str) -> Transformer:
    """A model on the fake GPU, in bf16 or with codes of a scheme."""
    model = skeleton(shape)
    shrink(model, torch.bfloat16)
    if form != "bf16":
        put_quantized(model, shape, dict.fromkeys(quantizable(shape), SCHEMES[form]), {}, torch.bfloat16)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
            setattr(module, name, nn.Parameter(there, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))
    return model.eval()


def counted_step(shape: ModelShape, form: str, batch: int, context: int, cache: str = "model") -> StepCounts:
    """Count a decode step of `batch` rows that see `context` positions each, the second of its kind: what products make
    of weights once is made."""
    ignored, counts = StepCounts(), StepCounts()
    with compat.fake_tensors(), torch.no_grad(), WithoutDriver(), fake_gpu(ignored, context):
        model = fake_model(shape, form)
        cache_pool = PagedCache(model, 2, BLOCK, form=cast(Any, cache))
        layers = PreparedLayers(model, packed=True, head="model")
        longest = next(number for number in position_numbers(shape.max_positions) if number >= context)
        numbers = torch.zeros(5, batch, dtype=torch.int64, device="cuda")
        tables = torch.zeros(1 + batch * -(-context // BLOCK), dtype=torch.int64, device="cuda")

        def step() -> None:
            places = StepPlaces(numbers[2], [], {}, RowsCall(tables, numbers[3], numbers[4], longest))
            with layers.use():
                x, _ = model.hidden(numbers[:1], positions=numbers[1:2], cache=cache_pool.at(places))
                layers.logits(x[0]).float()  # as they are copied out of a graph

        step()
        with fake_gpu(counts, context), Counting(counts), _calls(counts):
            step()
    return counts


@contextmanager
def _calls(counts: StepCounts) -> Iterator[None]:
    """Count calls of the package's functions."""
    root = str(Path(meshwright.__file__).parent)

    def heard(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            counts.calls += 1

    sys.setprofile(heard)
    try:
        yield
    finally:
        sys.setprofile(None)


def predicted_s(counts: StepCounts, shape: ModelShape, form: str, batch: int, context: int, device: Device) -> float:
    """Predict the step's time as one graph, by the planner's curves."""
    kernels = DeviceKernels(device)
    of_form = formats_of(form, experts=False).attention
    total = 0.0
    for launch in counts.launches:
        if launch.product is not None:
            m, k, n = launch.product
            total += kernels.product(float(m), float(k), float(n), BF16 if n == shape.vocab else of_form)
        elif launch.name == "paged_rows":
            heads, kv_heads, dim = float(shape.heads), float(shape.kv_heads), float(shape.head_dim)
            total += kernels.decode(batch, context, heads, kv_heads, dim, cache_width=2.0)
        else:
            total += LAUNCH_US / 1e6 + kernels.moved(launch.read_bytes + launch.written_bytes)
    return total


def limit_s(shape: ModelShape, form: str, device: Device) -> float:
    """Of reading every weight once, but the embedding."""
    width = formats_of(form, experts=False).attention.width
    sizes = quantizable(shape)
    matrices = sum(torch.Size(size).numel() for size in sizes.values())
    return (matrices * width + 2.0 * shape.vocab * shape.hidden) / device.memory_bytes_per_s


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h200-sxm")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    shape, device = presets.model(asked.model), presets.device(asked.device)
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        for batch in BATCHES:
            counts = counted_step(shape, form, batch, asked.context)
            seconds = predicted_s(counts, shape, form, batch, asked.context, device)
            rows.append({
                "form": form, "batch": batch, "launches": len(counts.launches), "dispatches": counts.dispatches,
                "calls": counts.calls, "read_bytes": counts.read_bytes, "written_bytes": counts.written_bytes,
                "predicted_seconds": seconds, "weights_seconds": limit_s(shape, form, device),
                "kernels": dict(counts.by_name),
            })  # fmt: skip
    if asked.json:
        print(json.dumps({"model": shape.name, "device": device.name, "context": asked.context, "rows": rows}))
        return
    print(f"{shape.name}, a decode step at {asked.context} positions; times are predictions for {device.name}")
    heads = ("weights", "rows", "launches", "host operations", "Python calls", "GB read", "GB written", "predicted")
    print(f"| {' | '.join((*heads, 'weights alone'))} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['form']} | {row['batch']} | {row['launches']} | {row['dispatches']:,} | {row['calls']:,} | "
            f"{row['read_bytes'] / 1e9:.2f} | {row['written_bytes'] / 1e9:.3f} | "
            f"{row['predicted_seconds'] * 1e3:.2f} ms | {row['weights_seconds'] * 1e3:.2f} ms |"
        )


if __name__ == "__main__":
    main()
