"""Products by oneDNN, switched on whatever this processor is."""

import random
import time

import pytest
import torch

from meshwright import compat
from meshwright.kernels import cpu_product, fast
from meshwright.kernels.target import acting_as
from meshwright.model.transformer import build
from meshwright.observe.profile.cpu_allocator import watching
from meshwright.spec import ModelShape
from tests.counting import Operations


@pytest.fixture(autouse=True)
def slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(compat, "blas_is_slow", lambda: True)
    monkeypatch.setattr(compat, "blas_takes_half", lambda: True)


def sizes(seed: int) -> tuple[int, int, int]:
    """Odd sizes, of which half are above the least that oneDNN is asked for."""
    draw = random.Random(seed)
    return draw.randint(1, 300), draw.randint(1, 300), draw.randint(1, 300)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("seed", range(20))
def test_products_are_as_exact_as_torchs(seed: int) -> None:
    rows, inner, columns = sizes(seed)
    torch.manual_seed(seed)
    a, b, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    total = torch.randn(rows, columns)
    exact = a.double() @ b.double().t()
    for found, wanted in (
        (cpu_product.linear(a, b, bias), exact + bias.double()),
        (cpu_product.linear(a.view(1, rows, inner), b)[0], exact),
        (cpu_product.multiply(a, b.t()), exact),
        (cpu_product.multiply(a.t().contiguous().t(), b.t().contiguous()), exact),
        (cpu_product.add_product(total.clone(), a, b.t()), exact + total.double()),
    ):
        assert found.shape == wanted.shape and found.is_contiguous()
        assert error(found, wanted) < 1e-6


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
    given = torch.randn(2, rows, columns)
    fast().linear(x, weight, bias).backward(given)
    wide = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    torch.nn.functional.linear(*wide).backward(given.double())
    for one, exact in zip((x, weight, bias), wide, strict=True):
        assert one.grad is not None and exact.grad is not None
        assert error(one.grad, exact.grad) < 1e-6


def test_only_large_products_of_fp32_on_a_cpu_are_its() -> None:
    large, small = torch.randn(128, 128), torch.randn(16, 128)
    assert cpu_product.pays(large, 128) and not cpu_product.pays(small, 128)
    assert not cpu_product.pays(large.bfloat16(), 128) and not cpu_product.pays(large.double(), 128)
    with acting_as("cuda"):
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
    found = torch.autograd.grad(compiled.sum(), (x, weight))
    assert torch.equal(eager, compiled) and all(map(torch.equal, wanted, found))
    torch._dynamo.reset()


def test_a_transposed_operand_is_copied_part_by_part() -> None:
    x, gradient = torch.randn(8192, 64), torch.randn(8192, 256)
    exact = gradient.double().t() @ x.double()
    with watching() as seen:
        found = cpu_product.multiply(gradient.t(), x)
    assert error(found, exact) < 1e-6 and found.is_contiguous()
    assert max(total for _, total in seen.totals()) < 0.6 * gradient.nbytes


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), [(6000, 200, 48), (6127, 512, 32), (4096, 2048, 256), (512, 8192, 64)])
def test_what_it_takes_inside_is_known(m: int, k: int, n: int, turned: bool) -> None:
    """Of a transposed first operand, beside the result and what oneDNN packs; of rows nothing."""
    b = torch.randn(k, n).t() if turned else torch.randn(n, k)
    for a in (torch.randn(k, m).t(), torch.randn(m, k)):
        with watching() as heard:
            found = torch.ops.meshwright.cpu_product(a, b, None)
        peak = max(held for _, held in heard.totals())
        assert peak - found.nbytes == pytest.approx(cpu_product.scratch_bytes(a, b), abs=3 * b.nbytes)


def test_no_order_of_operands_is_slow() -> None:
    """oneDNN falls back to plain loops, a thousand times as slow, where rows of the second operand have gaps."""
    a, b = torch.randn(4096, 512).t(), torch.randn(64, 4096)
    cpu_product.linear(a, b)
    began = time.process_time()
    cpu_product.linear(a, b)
    assert time.process_time() - began < 0.5


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


def test_a_transposed_operand_is_left_to_mkl_where_copying_it_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "blas_takes_half", lambda: False)
    x, gradient = torch.randn(512, 64), torch.randn(512, 96)
    with Operations() as made:
        cpu_product.multiply(gradient.t(), x)
    assert not any("cpu_product" in name for name in made.counts)
    with Operations() as made:
        cpu_product.multiply(gradient, torch.randn(96, 64))
    assert any("cpu_product" in name for name in made.counts)
