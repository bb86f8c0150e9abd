"""Products by oneDNN, switched on whatever this processor is."""

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import compat
from meshwright.compat import cpu
from meshwright.kernels import fast
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.linear import cpu_product
from meshwright.kernels.linear.linear import linears_reference
from meshwright.model.transformer import build
from meshwright.observe.profile.allocator import watching
from meshwright.spec import ModelShape
from tests.counting import Operations


@pytest.fixture(autouse=True)
def slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    if not cpu.fp32_products_are_exact():
        pytest.skip("oneDNN rounds fp32 products on this CPU")
    monkeypatch.setattr(compat, "blas_is_slow", lambda: True)


def sizes(seed: int) -> tuple[int, int, int]:
    """Odd sizes, of which half are above the least that oneDNN is asked for."""
    draw = random.Random(seed)
    return draw.randint(1, 300), draw.randint(1, 300), draw.randint(1, 300)


def setting() -> str:
    library: Any = torch.backends.mkldnn  # whose types torch does not tell
    actual: str = library.matmul.fp32_precision
    return actual


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("seed", range(20))
def test_products_are_as_exact_as_torchs(seed: int) -> None:
    rows, inner, columns = sizes(seed)
    torch.manual_seed(seed)
    a, b, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    total = torch.randn(rows, columns)
    exact = a.double() @ b.double().t()
    for actual, wanted in (
        (cpu_product.linear(a, b, bias), exact + bias.double()),
        (cpu_product.linear(a.view(1, rows, inner), b)[0], exact),
        (cpu_product.multiply(a, b.t()), exact),
        (cpu_product.multiply(a.t().contiguous().t(), b.t().contiguous()), exact),
        (cpu_product.add_product(total.clone(), a, b.t()), exact + total.double()),
        (cpu_product.add_product(torch.full_like(total, torch.nan), a, b.t(), beta=0), exact),
    ):
        assert actual.shape == wanted.shape and actual.is_contiguous()
        assert error(actual, wanted) < 1e-6


@pytest.mark.parametrize("at_once", [1, 700, 2**20])
@pytest.mark.parametrize("seed", range(6))
def test_a_matrix_of_16_bits_is_widened_by_rows(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, some, and all at a time."""
    monkeypatch.setattr(cpu_product, "WIDENED_AT_ONCE", at_once)
    rows, inner, columns = sizes(seed)
    torch.manual_seed(seed)
    a, bias = torch.randn(rows, inner), torch.randn(columns).bfloat16()
    b, back = torch.randn(columns, inner).bfloat16(), torch.randn(inner, columns).bfloat16()
    exact = a.double() @ b.double().t() + bias.double()
    assert error(cpu_product.widened_linear(a, b, bias), exact) < 1e-6
    assert error(cpu_product.widened_linear(a.view(1, rows, inner), b, bias)[0], exact) < 1e-6
    assert cpu_product.widened_linear(a, b, bias, torch.float16).dtype == torch.float16
    assert error(cpu_product.widened_multiply(a, back), a.double() @ back.double()) < 1e-6
    assert torch.equal(cpu_product.widened_linear(a.bfloat16(), b), cpu_product.linear(a.bfloat16(), b))


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_and_its_gradients(seed: int) -> None:
    rows, inner, columns = sizes(seed)
    torch.manual_seed(seed)
    rows, columns = 4 * rows, 4 * columns
    x, weight, bias = (
        torch.randn(*size, requires_grad=True) for size in ((2, rows, inner), (columns, inner), (columns,))
    )
    inputs = torch.randn(2, rows, columns)
    fast().linear(x, weight, bias).backward(inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.linear(*wide).backward(inputs.double())
    for tensor, exact in zip((x, weight, bias), wide, strict=True):
        assert tensor.grad is not None and exact.grad is not None
        assert error(tensor.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("size", [16, 128])
def test_second_derivatives_are_right(size: int) -> None:
    """Above the least of oneDNN's products and below it."""

    def twice(run: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, first, second, bias = leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        made = run(x, (first, second), (bias, None))
        gradients = torch.autograd.grad(sum(tensor.square().mean() for tensor in made), leaves, create_graph=True)
        return torch.autograd.grad(sum(tensor.square().sum() for tensor in gradients), leaves)

    inputs = [torch.randn(*shape) for shape in ((2, size, size), (size, size), (size, size), (size,))]
    exact = twice(linears_reference, *(tensor.double() for tensor in inputs))
    singly = lambda x, weights, biases: tuple(map(partial(fast().linear, x), weights, biases))  # noqa: E731
    for run in (fast().linears, singly):
        for actual, right in zip(twice(run, *inputs), exact, strict=True):
            assert error(actual, right) < 2e-6


def test_only_large_products_of_fp32_on_a_cpu_are_its() -> None:
    large, small = torch.randn(128, 128), torch.randn(16, 128)
    assert cpu_product.pays(large, 128) and not cpu_product.pays(small, 128)
    assert not cpu_product.pays(large.bfloat16(), 128) and not cpu_product.pays(large.double(), 128)
    with simulate_device("cuda"):
        assert not cpu_product.pays(large, 128)
    with Operations() as seen:
        cpu_product.multiply(large, large)
        cpu_product.multiply(small, large)
    assert seen.counts["cpu_product"] == 1 and seen.counts["mm"] == 1


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_calls_it_too() -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fast().linear(x.relu(), weight) * 2

    x, weight = torch.randn(256, 128, requires_grad=True), torch.randn(96, 128, requires_grad=True)
    eager = layer(x, weight)
    wanted = torch.autograd.grad(eager.sum(), (x, weight))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight)
    actual = torch.autograd.grad(compiled.sum(), (x, weight))
    assert torch.equal(eager, compiled) and all(map(torch.equal, wanted, actual))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_code_adds_products(dtype: torch.dtype) -> None:
    """Which cannot follow the change of torch's setting."""
    total, a, b = torch.zeros(256, 96), torch.randn(256, 128).to(dtype), torch.randn(128, 96).to(dtype)
    torch._dynamo.reset()
    actual = torch.compile(cpu_product.add_product, fullgraph=True, backend="aot_eager")(total, a, b)
    assert actual is total and error(total, a.double() @ b.double()) < (1e-6 if dtype == torch.float32 else 1e-2)
    torch._dynamo.reset()


@pytest.mark.parametrize("rows", [1, 7, 64, 100])
def test_a_product_of_16_bits_is_added_in_pieces(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """To the bits of one sum, whether rows divide or not, and without a widened copy of the whole."""
    monkeypatch.setattr(cpu_product, "ADDED_AT_ONCE", 16 * 96)
    whole, a, b = torch.randn(rows, 2 * 96), torch.randn(128, rows).bfloat16().t(), torch.randn(128, 96).bfloat16()
    total, beside = whole[:, :96], whole[:, 96:].clone()
    wanted = total + a @ b
    cpu_product.add_product(total, a, b)
    assert torch.equal(total, wanted) and torch.equal(whole[:, 96:], beside)
    cpu_product.add_product(total.fill_(torch.nan), a, b, beta=0)
    assert torch.equal(total, (a @ b).float()) and torch.equal(whole[:, 96:], beside)


ORDERS = ("as it lies", "transposed", "with gaps", "transposed with gaps", "every second")


def lying(rows: int, columns: int, order: str) -> torch.Tensor:
    if order.startswith("transposed"):
        return lying(columns, rows, "with gaps" if "gaps" in order else "as it lies").t()
    if order == "with gaps":
        return torch.randn(rows, 3 * columns)[:, columns : 2 * columns]
    return torch.randn(rows, 2 * columns)[:, ::2] if order == "every second" else torch.randn(rows, columns)


@pytest.mark.parametrize("right", ORDERS)
@pytest.mark.parametrize("left", ORDERS)
def test_operands_may_lie_in_any_order(left: str, right: str) -> None:
    """Exact to fp32, though torch's setting allows bf16. None is left to oneDNN's plain loops, which are a thousand
    times as slow: more than a second."""
    a, b = lying(256, 4096, left), lying(4096, 64, right)
    exact, before = a.double() @ b.double(), setting()
    assert cpu_product.pays(a, 64)
    began = time.process_time()
    actual = [cpu_product.multiply(a, b), cpu_product.linear(a, b.t(), torch.ones(64)) - 1]
    actual.append(cpu_product.linear(a.unflatten(0, (2, 128)), b.t()).flatten(0, 1))
    assert time.process_time() - began < 0.5
    assert max(error(tensor, exact) for tensor in actual) < 1e-6
    for total in (torch.ones(256, 64), torch.ones(256, 128)[:, 32:96], torch.ones(64, 256).t()):
        began = time.process_time()
        assert cpu_product.add_product(total, a, b) is total
        assert time.process_time() - began < 0.5
        assert error(total, exact + 1) < 1e-6
    assert setting() == before


@pytest.fixture
def not_tried() -> Iterator[None]:
    cpu._fp32_products_are_exact.cache_clear()
    yield
    cpu._fp32_products_are_exact.cache_clear()


@pytest.mark.usefixtures("not_tried")
def test_a_processor_that_rounds_is_left_to_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with AMX would."""
    monkeypatch.setattr(cpu, "multiply_fp32", lambda a, b: (a.bfloat16() @ b.bfloat16()).float())
    assert not cpu.fp32_products_are_exact() and not cpu_product.pays(torch.randn(128, 128), 128)


@pytest.mark.parametrize("before", ["none", "ieee"])
def test_what_the_setting_inherits_it_inherits_afterwards(before: str) -> None:
    every: Any = torch.backends
    whole, matmul_precision = every.fp32_precision, setting()
    every.mkldnn.matmul.fp32_precision = "none"
    try:
        every.fp32_precision = before
        cpu_product.multiply(torch.randn(128, 128).t(), torch.randn(128, 128))
        every.fp32_precision = "tf32"
        assert setting() == "tf32"
    finally:
        every.fp32_precision, every.mkldnn.matmul.fp32_precision = whole, matmul_precision


@pytest.mark.usefixtures("not_tried")
@pytest.mark.parametrize("count", [1, 3])
def test_autocast_changes_none_of_them(count: int) -> None:
    """Not in the backward pass either, nor what is known of the processor."""
    x, *weights = (torch.randn(128, 128, requires_grad=True) for _ in range(1 + count))
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu.fp32_products_are_exact()
        torch.stack([tensor.sum() for tensor in fast().linears(x, weights, [None] * count)]).sum().backward()
    exact = x.detach().double().sum(0).expand(128, 128)
    for weight in weights:
        assert weight.grad is not None and error(weight.grad, exact) < 1e-6


def test_a_product_may_be_asked_for_inside_of_another() -> None:
    """As a handler of a signal does, or a mode that sees the first."""
    a, b, before = torch.randn(128, 128).t(), torch.randn(128, 128), setting()
    with cpu._use_onednn():
        assert error(cpu_product.multiply(a, b), a.double() @ b.double()) < 1e-6
        assert setting() == "bf16"
    assert setting() == before


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_has_neither_the_lock_nor_the_setting_of_a_thread() -> None:
    entered = Event()

    def multiply_long() -> None:
        with cpu._use_onednn():
            entered.set()
            time.sleep(0.2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(multiply_long)
        entered.wait()
        child = os.fork()
        if not child:
            free = cpu._ONE_CALL.acquire(timeout=2)
            os._exit(0 if free and setting() != "bf16" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_products_of_threads_leave_the_setting_as_it_was() -> None:
    a, b = torch.randn(128, 128).t(), torch.randn(128, 128)
    before = setting()
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda _: cpu_product.multiply(a, b), range(200)))
    assert all(tensor.equal(actual[0]) for tensor in actual)
    assert setting() == before


def test_a_mode_that_hears_of_a_product_may_multiply() -> None:
    class Checked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            actual = func(*args, **kwargs or {})
            if func is torch.ops.aten.addmm_.default:
                cpu_product.add_product(args[0].neg(), args[1], args[2])
            return actual

    def add() -> None:
        with Checked():
            cpu_product.add_product(total, torch.randn(128, 128), torch.randn(128, 128))

    total, before = torch.zeros(128, 128), setting()
    thread = Thread(target=add, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and total.abs().sum() > 0
    assert setting() == before


@pytest.mark.filterwarnings("ignore:.*clears events")
def test_a_product_copies_no_operand_and_no_sum() -> None:
    """oneDNN packs half a MiB for each thread."""
    x, gradient = torch.randn(8192, 64), torch.randn(8192, 256)
    total = torch.zeros(256, 64)
    with watching() as seen:
        cpu_product.multiply(gradient.t(), x)
        cpu_product.add_product(total, gradient.t(), x)
    assert max(held for _, held in seen.totals()) < gradient.nbytes / 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_takes_no_more_memory_than_with_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch's allocator: forward and backward."""
    shape = ModelShape(name="block", vocab=256, layers=1, hidden=192, heads=3, kv_heads=1, ffn=512, max_positions=512)
    model = build(shape).train()
    [block], x = model.blocks, torch.randn(8, 512, 192, requires_grad=True)
    attention_metadata = model.attention_metadata(torch.arange(512).expand(8, -1), 512, None)

    def peak(slow: bool) -> int:
        monkeypatch.setattr(compat, "blas_is_slow", lambda: slow)
        torch._dynamo.reset()
        compiled = torch.compile(block.compute, fullgraph=True, dynamic=False)
        for _ in range(2):  # the second one is counted: the first compiles
            with watching() as seen:
                compiled(x, attention_metadata[0], None)[0].sum().backward()
            model.zero_grad()
            x.grad = None
        return max(total for _, total in seen.totals())

    assert peak(True) <= 1.005 * peak(False)
    torch._dynamo.reset()
