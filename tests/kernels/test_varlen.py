"""Attention of packed documents and windows: against pairs written out, at every border, and how much of it is done."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.data import Sequences
from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import partial as partial_attention
from meshwright.kernels.attention import varlen
from meshwright.kernels.attention.attend import DocumentSpans, Mask, attend, attend_reference, causal_mask
from meshwright.kernels.chooser import simulate_device
from meshwright.training.step.batches import Share, select, split, to_batch
from tests.counting import Operations
from tests.kernels.exactness import FUSED_ATTENTION, assert_not_worse, assert_single, plain_attention, tensors

SCALE = 0.2


def queries_keys_values(
    length: int, keys: int = 2, values: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return tensors((3, length, 4, 8), (3, length, keys, 8), (3, length, keys, values), dtype=dtype)


def random_documents(length: int, share: float, seed: int) -> Tensor:
    drawn = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < share
    return drawn.int().cumsum(1).int()


@pytest.mark.parametrize("in_blocks", [False, True], ids=["flash", "blockwise"])
@pytest.mark.parametrize("window", [0, 1, 7, 64, 100])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("length", [1, 63, 130, 400])
@pytest.mark.long
def test_random_borders_and_windows(
    length: int, share: float, window: int, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: in_blocks)
    mask = causal_mask(length, length, window=window, documents=random_documents(length, share, length))
    exact = partial(attend_reference, mask=Mask(mask.window, mask.documents), scale=SCALE)
    assert_single(
        partial(attend, mask=mask, scale=SCALE), exact, queries_keys_values(length, keys=1, values=6), bound=2e-6
    )


@pytest.mark.parametrize("values", [3, 8, 13])
def test_values_of_another_width_than_keys(values: int) -> None:
    mask = causal_mask(90, 90, window=70, documents=random_documents(90, 0.02, 2))
    assert_single(
        partial(attend, mask=mask, scale=SCALE), partial(attend_reference, mask=mask, scale=SCALE),
        queries_keys_values(90, keys=4, values=values), bound=2e-6,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 50])
def test_16_bit_is_no_further_from_the_truth_than_plain_code(dtype: torch.dtype, window: int) -> None:
    mask = causal_mask(300, 300, window=window, documents=random_documents(300, 0.02, 1))
    seen = mask.allowed(300, 300, torch.device("cpu"))[:, 0]
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    bars = [FUSED_ATTENTION] * 4 if compat.cpu_multiplies(dtype) else []
    assert_not_worse(partial(attend, mask=mask, scale=SCALE), plain, plain, queries_keys_values(300, dtype=dtype), bars)


def test_what_documents_hide_is_not_multiplied() -> None:
    """Eight documents of a row: eight calls of an eighth, and no tensor of S x S."""
    documents = (torch.arange(512) // 64).expand(3, -1)
    largest = 0

    def watched(*arguments: Any, mask: Tensor | None, **options: Any) -> Any:
        nonlocal largest
        assert mask is None
        largest = max(largest, arguments[0].shape[2] * arguments[1].shape[2])
        return flash(*arguments, mask=mask, **options)

    flash = compat.flash_attention
    with pytest.MonkeyPatch.context() as patched, Operations() as made:
        patched.setattr(compat, "flash_attention", watched)
        patched.setattr(attention, "prefers_blockwise", lambda *_: False)
        attend(*queries_keys_values(512), causal_mask(512, 512, documents=documents), scale=SCALE)
    assert largest == 64 * 64
    assert sum(count for name, count in made.counts.items() if "flash" in name) == 3 * 8


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_compiled_operator_is_declared_as_it_is(share: float) -> None:
    q, k, v = (x.requires_grad_() for x in queries_keys_values(70))
    for way in ("flash", "blocks"):
        for window in (0, 9):
            arguments = (q, k, v, random_documents(70, share, 3), None, None, window, SCALE, way, 0.0, None)
            torch.library.opcheck(varlen.varlen_attention, arguments)


def test_blocks_keep_queries_keys_and_values_alone() -> None:
    """They make the weights again: the result is not needed."""
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    q, k, v = (x.requires_grad_() for x in queries_keys_values(80))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        varlen.attend(q, k, v, varlen.AttentionForm(None, None, None, 0, SCALE, "blocks"))
    assert saved == [q.numel(), k.numel(), v.numel()]


def test_borders_for_a_gpu_are_those_of_the_rows_one_after_another() -> None:
    documents = torch.tensor([[4, 4, 7, 7], [1, 1, 1, 1], [0, 1, 2, 2]])
    assert varlen.borders_of(documents, 0).tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert varlen.borders_of(documents, 6).tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert varlen.borders_of(documents, 8).tolist() == [0, 2, 4, 8, 9, 10, 12, 12, 12]


@pytest.mark.parametrize("window", [0, 5])
def test_no_host_waits_for_the_borders_of_a_gpu(window: int) -> None:
    """On fake tensors: whatever reads a value raises."""
    with simulate_device("cuda"), compat.fake_tensors():
        q, k, v = (torch.empty(2, 40, 4, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        documents = torch.zeros(2, 40, dtype=torch.int32)
        mask = causal_mask(40, 40, window=window, documents=documents, spans=DocumentSpans(7, 20))
        out = attend(q, k, v, mask, scale=SCALE)
        out.backward(torch.ones_like(out))
        assert q.grad is not None and mask.borders is not None and mask.borders.shape == (8,)


def test_another_number_of_documents_is_not_compiled_anew() -> None:
    """Blocks are compiled for constant sizes; that of the borders is none."""
    made = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal made
        made += 1
        return graph.forward

    @torch.compile(backend=count, dynamic=False)
    def read(x: Tensor, borders: Tensor) -> Tensor:
        return x * borders.sum()

    for number in (3, 4, 9, 30):
        read(torch.ones(3), varlen.borders_of(torch.arange(number)[None], number))
    assert made == 1


@pytest.mark.parametrize("window", [0, 20])
def test_a_gpu_compiles_attention_over_documents_whole(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to torch that the compiler cannot trace would cut the block in two there, and each half keeps what a
    whole block makes again: two norms a layer of llama-3.2-1b, 1.94 GiB on an H200."""
    for module in (attention, partial_attention, varlen):
        monkeypatch.setattr(module, "device_kind", lambda x: "cuda")
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(partial_attention, "_cached_device_fuses", lambda *about: bool(asked.append(about)) or True)
    graphs: list[Any] = []

    def seen(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *operands: (operands[0].new_zeros(2, 40, 4, 16),)

    q = torch.randn(2, 40, 4, 16, dtype=torch.bfloat16)
    k = torch.randn(2, 40, 2, 16, dtype=torch.bfloat16)
    mask = causal_mask(
        40, 40, window=window, documents=torch.zeros(2, 40, dtype=torch.int32), spans=DocumentSpans(7, 20)
    )
    torch.compile(partial(attend, scale=SCALE), backend=seen, fullgraph=True, dynamic=False)(q, k, k, mask)
    (graph,) = graphs
    assert asked == [(torch.device("cpu"), torch.bfloat16, 16, True)]
    operators = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert any("varlen_attention" in name for name in operators)


def test_a_batch_knows_how_many_documents_its_parts_hold_and_how_long_they_are() -> None:
    """So that no device is asked."""
    documents = np.array([[0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 4, 4], [1, 2, 2, 3, 3, 3]], dtype=np.int32)
    sequences = Sequences(tokens=documents, targets=documents, documents=documents, positions=documents, packed=True)
    batch = to_batch(sequences, torch.device("cpu"), document_mask=True, rows=4)
    assert batch.documents_of_rows == ((1, 6), (2, 4), (3, 3), (1, 6)) and batch.spans == DocumentSpans(7, 6)
    assert [part.spans for part in split(batch, 2)] == [DocumentSpans(3, 6), DocumentSpans(4, 6)]
    assert select(batch, Share(index=1, parts=4)).spans == DocumentSpans(2, 4)
    assert to_batch(sequences, torch.device("cpu"), document_mask=False).spans == DocumentSpans()


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("values", [8, 6, 12])
@pytest.mark.parametrize("width", [8, 20])
def test_on_a_gpu_the_flash_kernel_reads_borders(
    width: int, values: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its meaning, written out here; what it is given must give the same as the mask."""

    def pairs(borders: Tensor, total: int) -> Tensor:
        number = torch.searchsorted(borders.long(), torch.arange(total), right=True)
        back = torch.arange(total)[:, None] - torch.arange(total)
        return (number[:, None] == number) & (back >= 0) & (back < (window or total))

    def forward(
        q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert options == {"window": window, "scale": SCALE} and longest == 33
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("she,the->hst", q.float(), k.float()) * SCALE
        scores = scores.masked_fill(~pairs(borders, len(q)), float("-inf"))
        out = torch.einsum("hst,the->she", scores.softmax(-1), v.float()).to(q.dtype)
        return out, scores.logsumexp(-1)

    monkeypatch.setattr(compat, "varlen_attention", forward)
    q, k, v = tensors((3, 40, 4, width), (3, 40, 2, width), (3, 40, 2, values), dtype=torch.bfloat16)
    documents = random_documents(40, 0.1, 5)
    with simulate_device("cuda"):
        mask = causal_mask(40, 40, window=window, documents=documents, spans=DocumentSpans(32, 33))
        actual = attend(q, k, v, mask, scale=SCALE)
    exact = attend_reference(q.double(), k.double(), v.double(), mask, scale=SCALE)
    torch.testing.assert_close(actual.float(), exact.float(), rtol=2e-2, atol=2e-2)
