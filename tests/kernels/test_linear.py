"""Linear layers, one and several at once, with 16-bit products native and widened."""

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fast, reference
from meshwright.kernels.linear import cpu_product
from tests.counting import Alive, saved_bytes
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, outcome, tensors
from tests.operation_recorder import Recording

CPUINFO = Path("/proc/cpuinfo")


def single(linear: Callable[..., Tensor], bias: bool) -> Callable[..., Tensor]:
    return linear if bias else lambda x, weight, unused: linear(x, weight) + 0 * unused.sum()


def several(linears: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """Three layers of one input, the second with a bias, as one tensor."""

    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
        return torch.cat(linears(x, (a, b, c), (None, bias, None)), dim=-1)

    return run


def triple(*lead: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors((*lead, 9), (5, 9), (3, 9), (4, 9), (3,), dtype=dtype)


@pytest.mark.parametrize("lead", [(7,), (2, 3), (2, 3, 4), (1,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_one_layer(lead: tuple[int, ...], bias: bool) -> None:
    inputs = tensors((*lead, 9), (5, 9), (5,))
    assert_single(single(fast().linear, bias), single(reference().linear, bias), inputs)


@pytest.mark.parametrize("lead", [(7,), (2, 3), (2, 3, 4), (1,)], ids=str)
def test_several_layers_of_one_input(lead: tuple[int, ...]) -> None:
    assert_single(several(fast().linears), several(reference().linears), triple(*lead))


def test_second_derivatives_are_not_needed_but_first_ones_are_right() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in triple(2, 3)]
    assert torch.autograd.gradcheck(several(fast().linears), inputs)
    assert torch.autograd.gradcheck(fast().linear, [inputs[0], inputs[1]])


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
def test_16_bit_is_no_further_from_fp64_than_plain_code(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: native)
    exact = several(reference().linears)
    inputs = tensors((2, 20, 64), (16, 64), (24, 64), (8, 64), (24,), dtype=dtype)
    assert_not_worse(several(fast().linears), exact, exact, inputs)
    single = tensors((2, 20, 64), (16, 64), (16,), dtype=dtype)
    assert_not_worse(fast().linear, reference().linear, reference().linear, single)


def test_widened_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    x, weight = tensors((4, 64), (8, 64), dtype=torch.bfloat16)
    assert torch.equal(fast().linear(x, weight), (x.double() @ weight.double().T).bfloat16())


@pytest.mark.parametrize(("rows", "widened"), [((1,), False), ((2, 1), False), ((3,), True), ((2, 2), True)], ids=str)
def test_a_matrix_is_not_widened_for_one_row_or_two(
    rows: tuple[int, ...], widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which it would be the larger part of the work."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    monkeypatch.setattr(compat, "HAS_VECTORS", True)
    x, weight = tensors((*rows, 64), (8, 64), dtype=torch.bfloat16)
    with Recording() as actual:
        fast().linear(x, weight)
    made = [out for _, _, _, out in actual.calls if isinstance(out, Tensor) and out.dtype == torch.float32]
    assert any(out.shape == weight.shape for out in made) is widened


def test_a_large_matrix_is_never_widened_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts give what it does, in less memory than it has itself."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    monkeypatch.setattr(cpu_product, "WIDENED_AT_ONCE", 100 * 64)
    x, weight, bias = tensors((3, 5, 64), (1030, 64), (1030,), dtype=torch.bfloat16)
    with torch.no_grad(), Alive([x, weight, bias]) as alive:
        actual = fast().linear(x, weight, bias)
    torch.testing.assert_close(actual, reference().linear(x.double(), weight.double(), bias.double()).bfloat16())
    assert alive.peak_bytes < weight.nbytes


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="asks Linux what an x86 CPU has")
@pytest.mark.parametrize("limit", ["", "ALL", "AVX512_CORE_BF16", "AVX512_CORE", "avx2"])
def test_units_for_bf16_are_those_that_linux_names_and_onednn_may_use(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    flags = set(CPUINFO.read_text(encoding="utf-8").split())
    cut = limit in ("AVX512_CORE", "avx2")
    assert compat.has_bf16_units() is (not cut and bool(flags & {"avx512_bf16", "amx_bf16"}))


def test_an_empty_limit_of_onednn_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it reads the name that it had before (oneDNN's getenv_string_user)."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    for limit, units in (("AVX2", False), ("", True)):
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
        assert compat.has_bf16_units() is units


def test_a_result_that_is_not_used_gets_no_gradient_of_its_own() -> None:
    x, a, b, c, bias = (tensor.requires_grad_() for tensor in triple(6))
    first, _, _ = fast().linears(x, (a, b, c), (None, bias, None))
    first.sum().backward()
    assert x.grad is not None and a.grad is not None
    torch.testing.assert_close(x.grad, a.detach().sum(0).expand(6, 9))
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in (b, c, bias))


def test_inputs_and_gradients_may_be_views() -> None:
    def run(layers: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        return layers(x.transpose(0, 1)[..., ::2], *others).transpose(0, 1)

    inputs = tensors((3, 4, 18), (5, 9), (3, 9), (4, 9), (3,))
    fast_form, plain = several(fast().linears), several(reference().linears)
    assert_single(partial(run, fast_form), partial(run, plain), inputs)


@pytest.mark.parametrize("frozen", range(5))
def test_frozen_parameters_get_no_gradient(frozen: int) -> None:
    inputs = [tensor.requires_grad_(index != frozen) for index, tensor in enumerate(triple(6))]
    several(fast().linears)(*inputs).sum().backward()
    exact = outcome(lambda *all: several(reference().linears)(*all).sum(), [t.detach() for t in inputs])
    seed = torch.randn((), generator=torch.Generator().manual_seed(1)).bfloat16().double()
    for index, tensor in enumerate(inputs):
        if index == frozen:
            assert tensor.grad is None
        else:
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad.double(), exact[1 + index] / seed, rtol=1e-4, atol=1e-5)


def test_the_input_is_kept_once_for_all() -> None:
    inputs = [tensor.requires_grad_() for tensor in triple(50)]
    _, saved = saved_bytes(lambda: several(fast().linears)(*inputs), without=inputs)
    assert saved == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_have_gradients_too(dtype: torch.dtype) -> None:
    """An expert may get no token."""
    x, weight = torch.zeros(0, 6, dtype=dtype, requires_grad=True), torch.ones(4, 6, dtype=dtype, requires_grad=True)
    fast().linear(x, weight, None).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 6)
    assert weight.grad is not None and not weight.grad.any()
