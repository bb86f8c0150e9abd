"""The kernel that attention says it takes is the one that runs."""

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from meshwright import compat
from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import gpu
from meshwright.kernels.attention.attend import Mask, attend, backend, causal_mask
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.oracle.features import shrink
from meshwright.spec import Layout, Plan, Recipe
from meshwright.spec.plan.execution import LEAST_CUDNN, GpuLibraries
from meshwright.training import device
from tests.counting import Operations
from tests.kernels.exactness import drops

OPERATIONS = {
    "flash": "_scaled_dot_product_flash_attention_for_cpu",
    "math": "softmax",
    "blockwise": "bmm",
}


@pytest.mark.parametrize("widths", [(16, 16), (24, 16)], ids=["equal", "latent"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("blockwise", [False, True])
def test_what_is_said_is_what_runs(
    widths: tuple[int, int], packed: bool, dropout: float, blockwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: blockwise)
    q, k = (torch.randn(1, 8, 4, widths[0], requires_grad=True) for _ in range(2))
    v = torch.randn(1, 8, 4, widths[1], requires_grad=True)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]]) if packed else None
    mask = causal_mask(8, 8, documents=documents)
    named = backend(q, k, v, mask, scale=0.25, dropout=dropout)
    assert named == ("blockwise" if dropout or blockwise else "flash")
    with Operations() as made:
        attend(q, k, v, mask, scale=0.25, dropout=drops(q, dropout))
    ran = [name for name, operation in OPERATIONS.items() if any(operation in called for called in made.counts)]
    assert named in ran and ("flash" in ran) == (named == "flash")


def test_a_dry_run_for_a_gpu_models_flash_wherever_that_takes_the_input() -> None:
    make = torch.empty(1, 8, 4, 16, dtype=torch.bfloat16)
    packed = causal_mask(8, 8, documents=torch.zeros(1, 8, dtype=torch.int64))
    with simulate_device("cuda"):
        assert backend(make, make[:, :, :2], make[:, :, :2], Mask(), scale=1.0) == "flash"
        assert backend(make, make, make, packed, scale=1.0) == "flash"
        assert backend(make.float(), make.float(), make.float(), Mask(), scale=1.0) == "efficient"
        assert backend(make.float(), make.float(), make.float(), packed, scale=1.0) == "efficient"


def test_whole_rows_go_through_cudnn_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors of a GPU, which this build of torch has no gradients of; what is not whole rows stays with flash."""
    monkeypatch.setattr(gpu, "installed", lambda device: GpuLibraries(9, LEAST_CUDNN))
    monkeypatch.setattr(gpu, "problem", lambda *about: "")

    def ran(length: int = 1024, dim: int = 64, mask: Mask | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
        q = torch.empty(2, length, 8, dim, dtype=dtype, device="cuda")
        k = torch.empty(2, length, 2, dim, dtype=dtype, device="cuda")
        chosen_mask = mask or causal_mask(length, length)
        with Operations() as made:
            out = attend(q, k, k, chosen_mask, scale=0.1)
        assert out.shape == q.shape and out.dtype == dtype
        kernels = [
            name for name in ("cudnn", "flash", "efficient") if any(f"_{name}_att" in called for called in made.counts)
        ]
        assert kernels == [backend(q, k, k, chosen_mask, scale=0.1)]
        return kernels[0]

    gpu.choose.cache_clear()
    with compat.fake_tensors():
        assert ran() == ran(4096, 128) == ran(dtype=torch.float16) == "cudnn"
        gpu.choose.cache_clear()
        monkeypatch.setattr(gpu, "problem", lambda *about: "its trial was off by 0.2")
        q = torch.empty(2, 1024, 8, 64, dtype=torch.bfloat16, device="cuda")
        assert attention.gpu_kernel(q, q, q, Mask()) == "flash"
    gpu.choose.cache_clear()


def test_cudnn_keeps_the_tensors_that_flash_keeps() -> None:
    """Of fake tensors: for which reason plans and dry runs count one for the other."""
    stored: dict[str, int] = {}
    with compat.fake_tensors():
        for name in ("flash", "cudnn"):
            q, k, v = (torch.empty(2, heads, 512, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2))
            saved: dict[int, int] = {}

            def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                saved[id(tensor)] = tensor.nbytes
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                if name == "cudnn":
                    compat.cudnn_attention(q, k, v, scale=0.1)
                else:
                    torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=0.1)
            stored[name] = sum(size for size in saved.values() if size > 64)
    assert stored["flash"] == stored["cudnn"] > 0


def test_on_a_gpu_torch_is_not_left_to_prefer_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of both it prefers depends on the build and the chip; whole rows ask for cuDNN by name."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        device.prepare(torch.device("cuda"), "fp32")
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_run_records_the_kernel_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of head counts and widths as a rank has them."""
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: False)
    cpu, recipe = torch.device("cpu"), Recipe(sequence=64, document_mask=False)
    for name in ("llama-3.1-8b", "deepseek-v3"):
        assert device.attention_kernel(Plan(model=shrink(name), recipe=recipe), cpu) == "flash"
    ring = Plan(model=shrink("llama-3.1-8b"), recipe=recipe, layout=Layout(cp=2))
    assert device.attention_kernel(ring, cpu) == "ring of flash parts"
    packed = Plan(model=shrink("llama-3.1-8b"), recipe=Recipe(sequence=64), layout=Layout(cp=2))
    assert device.attention_kernel(packed, cpu) == "ring of flash parts"
    window = Plan(model=replace(shrink("llama-3.1-8b"), window=8), recipe=recipe, layout=Layout(cp=2))
    assert device.attention_kernel(window, cpu) == "ring of flash parts"


def of_torch_2_11(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
    return q, {"scale": scale, "window_size": window_size}


def of_torch_2_13(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    return q, {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa, "block_table": block_table}


def test_varlen_attention_is_called_as_each_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads: torch 2.11 takes them unasked. Signatures of torch 2.11.0 and 2.13.0."""
    q, k, borders, table = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16), torch.tensor([0, 8]), torch.zeros(1, 1)
    inputs = q, k, k, borders, borders, 8, 8
    assert {"window_size", "scale"} <= set(signature(torch_varlen.varlen_attn).parameters)
    for function, known in ((of_torch_2_11, {}), (of_torch_2_13, {"enable_gqa": True, "block_table": None})):
        monkeypatch.setattr(torch_varlen, "varlen_attn", function)
        made: Any = compat.varlen_attn(*inputs, scale=0.5, window_size=(-1, 0))
        assert made == (q, {"scale": 0.5, "window_size": (-1, 0), **known})
    compat.varlen_attn(*inputs, block_table=table)
    monkeypatch.setattr(torch_varlen, "varlen_attn", of_torch_2_11)
    with pytest.raises(NotImplementedError, match="has no seqused_k, block_table"):
        compat.varlen_attn(*inputs, seqused_k=borders, block_table=table)
