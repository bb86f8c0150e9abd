"""Which library attends on a GPU: the table, the trial before a kernel is taken, and calls of FlashAttention 4, for
which a module stands in that takes the arguments of the real one."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.compat import attention as kernels_of_torch
from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import gpu as gpu_attention
from meshwright.kernels.attention import varlen
from meshwright.kernels.attention.attend import DocumentSpans, Mask, attend_reference, causal_mask
from meshwright.kernels.attention.paged import prompt_kernel
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.dryrun.simulate import workspace_bytes
from meshwright.planner.cost import speeds
from meshwright.planner.explain import caveats
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.extras import install
from meshwright.spec.plan.execution import (
    HOPPER,
    LATENT,
    LEAST_CUDNN,
    AttentionCall,
    Case,
    GpuLibraries,
    KernelChoice,
    attention_kernel,
)
from meshwright.training import device
from meshwright.verbs.doctor import engine
from tests.kernels.exactness import tensors

EXTRA = install("gpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WHOLE, PACKED = AttentionCall("rows", 8192, 128, 128), AttentionCall("documents", 8192, 128, 128)
ALL = GpuLibraries(9, LEAST_CUDNN, flash_4=True)
SCALE = 0.2


# the table


def test_the_faster_kernel_is_taken_where_it_takes_the_work() -> None:
    assert {attention_kernel(WHOLE, ALL._replace(major=major)).kernel for major in (9, 10)} == {"cudnn"}
    for case in ("documents", "window"):
        for widths in ((128, 128), (64, 64), LATENT):
            call = AttentionCall(case, 512, *widths)
            assert attention_kernel(call, ALL).kernel == attention_kernel(call._replace(gradients=False), ALL).kernel
            assert attention_kernel(call, ALL).kernel == "flash-4"
            assert attention_kernel(AttentionCall("cache", 0, *widths, gradients=False), ALL).kernel == "flash-4"


@pytest.mark.parametrize(
    ("call", "gpu", "why"),
    [
        (WHOLE, ALL._replace(major=8), "no faster kernel"),
        (WHOLE, ALL._replace(major=12), "no faster kernel"),
        (WHOLE, GpuLibraries(0), "no faster kernel"),
        (WHOLE, ALL._replace(cudnn=91800), "older than 9.19"),
        (WHOLE._replace(positions=512), ALL, "below 1,024"),
        (WHOLE._replace(width=256, value_width=256), ALL, "wider than 128"),
        (WHOLE._replace(width=36, value_width=36), ALL, "multiples of 8"),
        (WHOLE._replace(width=96, value_width=64), ALL, "another width"),
        (WHOLE._replace(gradients=False), ALL, "no gradients"),
        (WHOLE._replace(dropout=0.1), ALL, "dropout"),
        (WHOLE._replace(deterministic=True), ALL, "deterministic"),
        (PACKED, ALL._replace(major=8), "no faster kernel"),
        (PACKED, ALL._replace(flash_4=False), EXTRA),
        (PACKED._replace(width=256, value_width=256), ALL, "wider than 128"),
        (PACKED._replace(dropout=0.1), ALL, "dropout"),
        (PACKED._replace(deterministic=True), ALL, "deterministic"),
        (PACKED._replace(width=20, value_width=20), ALL, "multiples of 8"),
    ],
)
def test_flash_attends_what_the_faster_ones_do_not_take(call: AttentionCall, gpu: GpuLibraries, why: str) -> None:
    choice = attention_kernel(call, gpu)
    assert choice.kernel == "flash" and why in choice.reason


# a library that stands in for the real one


def plain(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, left: int | None) -> tuple[Tensor, Tensor]:
    """In fp64, at every pair: q (T, H, E), k (T, K, E), v (T, K, V)."""
    document = torch.searchsorted(borders.long(), torch.arange(len(q)), right=True)
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (document[:, None] == document) & (back >= 0) & (back <= (len(q) if left is None else left))
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("she,the->hst", q.double(), k) * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hst,thv->shv", scores.softmax(-1), v), scores.logsumexp(-1)


class Library(ModuleType):
    """flash_attn.cute.interface, with the parameters that 4.0.0b5 to 4.0.0b36 have in common, of those that matter."""

    def __init__(self, results: int = 5) -> None:
        super().__init__(kernels_of_torch.FLASH_4)
        self.results, self.calls = results, list[str]()

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        softmax_scale: float, causal: bool, window_size_left: int | None, window_size_right: int | None,
        return_lse: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert causal and softmax_scale == SCALE and window_size_right in (None, 0)
        if cu_seqlens_q is None:
            assert not return_lse and q.dim() == k.dim() == 4
            self.calls.append("past")
            mask = Mask(0 if window_size_left is None else window_size_left + 1)
            return attend_reference(q, k, v, mask, scale=SCALE), *(None,) * (self.results - 1)
        assert return_lse and cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        assert all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 for x in (q, k, v))
        self.calls.append("forward")
        out, lse = plain(q, k, v, cu_seqlens_q, window_size_left)
        return (out.to(q.dtype), lse.float(), None, None, None)[: self.results]

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float,
        causal: bool, window_size_left: int | None, window_size_right: int | None, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert lse.dtype == torch.float32 and lse.shape == (q.shape[1], len(q)) and out.shape == dout.shape
        self.calls.append("backward")
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            right = plain(*leaves, cu_seqlens_q, window_size_left)[0]
            torch.testing.assert_close(right.detach().to(out.dtype), out)
            return tuple(x.to(q.dtype) for x in torch.autograd.grad(right, leaves, dout.double()))


@pytest.fixture(params=[2, 5], ids=["as b5", "as b36"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in = Library(request.param)
    monkeypatch.setitem(sys.modules, kernels_of_torch.FLASH_4, stand_in)
    return stand_in


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """What was tried and chosen before."""
    for remembered in (gpu_attention.choose, gpu_attention.problem):
        getattr(remembered, "cache_clear", lambda: None)()


@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize(("width", "values"), [(16, 16), (24, 16), (16, 12)])
def test_documents_and_windows_by_flash_4_are_those_of_the_mask(
    width: int, values: int, window: int, library: Library
) -> None:
    """Values keep their own width, which FlashAttention 2 would have padded."""
    dtype = torch.float16
    q, k, v = tensors((3, 40, 4, width), (3, 40, 2, width), (3, 40, 2, values), dtype=dtype)
    documents = torch.tensor([0, 11, 12, 30]).expand(3, -1)
    documents = torch.searchsorted(documents.contiguous(), torch.arange(40).expand(3, -1).contiguous(), right=True)
    with simulate_device("cuda"):
        mask = causal_mask(40, 40, window=window, documents=documents, spans=DocumentSpans(14, 18))
    form = varlen.AttentionForm(mask.documents, mask.borders, mask.longest, mask.window, SCALE, "flash-4")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    gradient = tensors((3, 40, 4, values), dtype=dtype)[0]
    with simulate_device("cuda"):
        varlen.attend(*leaves, form).backward(gradient)
    attend_reference(*exact, Mask(mask.window, mask.documents), scale=SCALE).backward(gradient.double())
    assert library.calls == ["forward", "backward"]
    for ours, right in zip(leaves, exact, strict=True):
        assert ours.grad is not None and right.grad is not None
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-2, atol=5e-3)


# trials


@pytest.mark.parametrize("case", ["documents", "window", "cache"])
def test_a_kernel_that_is_right_passes_its_trial(library: Library, case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for widths, group in (((64, 64), 4), (LATENT, 1)):
            assert gpu_attention.problem("flash-4", CPU, dtype, *widths, group, case) == ""


def broken(library: Library, **spoiled: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """The library's passes with one result replaced."""

    def run(*arguments: Any, name: str, change: Callable[[Tensor], Any], **options: Any) -> Any:
        first, *others = getattr(Library, name)(library, *arguments, **options)
        return change(first), *others

    ((name, change),) = spoiled.items()
    return partial(run, name=name, change=change)


@pytest.mark.parametrize(
    ("passed", "change", "why"),
    [
        ("_flash_attn_fwd", lambda out: out * 1.1, "off by"),
        ("_flash_attn_fwd", lambda out: out.fill_(torch.nan), "off by inf"),
        ("_flash_attn_bwd", lambda dq: torch.zeros_like(dq), "off by"),
        ("_flash_attn_bwd", lambda dq: dq.view(-1, 3), "its trial failed: RuntimeError"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_taken(
    passed: str, change: Callable[[Tensor], Any], why: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if passed == "_flash_attn_fwd":  # its own backward pass looks at the result
        monkeypatch.setattr(library, "_flash_attn_bwd", lambda q, k, v, *_, **__: (q, k, v))
    monkeypatch.setattr(library, passed, broken(library, **{passed: change}))
    assert why in gpu_attention.problem("flash-4", CPU, torch.bfloat16, 64, 64, 2, "documents")


def test_a_library_that_cannot_be_imported_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kernels_of_torch.FLASH_4, None)
    assert "ModuleNotFoundError" in gpu_attention.problem("flash-4", CPU, torch.bfloat16, 64, 64, 2, "documents")


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (0.9, False)])
def test_cudnn_is_tried_too(factor: float, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def cudnn(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return attend_reference(*rows, Mask(), scale=factor * scale).transpose(1, 2)

    monkeypatch.setattr(compat, "cudnn_attention", cudnn)
    assert (gpu_attention.problem("cudnn", CPU, torch.bfloat16, 72, 72, 4, "rows") == "") == right


# who asks


def test_attention_of_a_gpu_asks_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a GPU without memory. Each form of call is tried once, and what fails goes through flash."""
    tried: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL)
    monkeypatch.setattr(gpu_attention, "problem", lambda *about: tried.append(about) or "")
    monkeypatch.setattr(attention, "can_fuse", lambda q, k: True)

    def taken(dropout: float = 0.0, **mask: Any) -> str:
        q, k = (torch.empty(2, 64, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2))
        return attention.backend(q, k, k, causal_mask(64, 64, **mask), scale=SCALE, dropout=dropout)

    with compat.fake_tensors():
        documents = torch.zeros(2, 64, dtype=torch.int32, device="cuda")
        spans = DocumentSpans(3, 40)
        assert taken(documents=documents, spans=spans) == taken(window=9) == "flash-4"
        assert taken(documents=documents, spans=spans, window=9) == "flash-4"
        assert taken(documents=documents, spans=spans, dropout=0.1) == "blockwise"
        assert [(about[0], about[-1]) for about in tried] == [("flash-4", "documents"), ("flash-4", "window")]
        assert {about[3:6] for about in tried} == {(64, 64, 4)}
        torch.use_deterministic_algorithms(True)
        try:
            assert taken(documents=documents, spans=spans) == "flash"
        finally:
            torch.use_deterministic_algorithms(False)
        forget()
        monkeypatch.setattr(gpu_attention, "problem", lambda *about: "its trial failed: OSError")
        assert taken(documents=documents, spans=spans) == "flash"
        with simulate_device("cuda"):
            assert taken(documents=documents, spans=spans) == "flash"


def test_a_run_says_which_library_attends_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        model=presets.model("llama-3.1-8b"), layout=Layout(),
        recipe=Recipe(sequence=4096, precision="bf16", document_mask=False),
    )  # fmt: skip
    monkeypatch.setattr(device.chooser, "why_unavailable", lambda device: "")
    monkeypatch.setattr(gpu_attention, "problem", lambda *about: "")
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL)

    def note(**recipe: Any) -> str:
        (line,) = device.attention_notes(replace(plan, recipe=replace(plan.recipe, **recipe)), CUDA)
        return line

    assert note() == "attention: cudnn (sm_90, bf16: 1.8 times FlashAttention 2, measured on an H200)"
    monkeypatch.setattr(compat, "flash_4_version", lambda: "4.0.0b36")
    packed = "attention: flash-4 (sm_90, bf16: 1.9 times FlashAttention 2, by published figures; flash-attn-4 4.0.0b36)"
    assert note(document_mask=True) == packed
    assert note(deterministic=True) == "attention: flash (deterministic)"
    forget()
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL._replace(flash_4=False))
    assert note(document_mask=True) == f"attention: flash (flash-attn-4 is not installed: {EXTRA})"
    assert device.attention_notes(replace(plan, recipe=replace(plan.recipe, precision="fp32")), CUDA) == []
    ring = replace(plan, layout=Layout(cp=2))
    assert device.attention_notes(ring, CUDA) == ["attention: ring of flash parts (context parallelism)"]


def test_the_doctor_says_what_keeps_a_faster_kernel_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "problem", lambda *about: "")
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL)
    assert engine._flash_2_reasons(CUDA, torch.bfloat16) == ""
    forget()
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL._replace(flash_4=False))
    told = engine._flash_2_reasons(CUDA, torch.bfloat16)
    assert told == f"; FlashAttention 2 for documents, window, cache: flash-attn-4 is not installed: {EXTRA}"
    forget()
    monkeypatch.setattr(gpu_attention, "installed", lambda device: GpuLibraries(8))
    assert engine._flash_2_reasons(CUDA, torch.bfloat16) == ""


@pytest.mark.parametrize("kernel", ["flash", "flash-4"])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("queries", [1, 12])
def test_queries_over_past_keys_have_no_mask_on_a_gpu(
    queries: int, window: int, kernel: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of a prompt, and a token where a window hides keys; in fp32, with gradients and with documents it has."""
    asked: list[tuple[int, int]] = []

    def banded(q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float) -> tuple[Tensor, Tensor]:
        asked.append((left, right))
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return attend_reference(*rows, Mask(left + 1), scale=scale).transpose(1, 2), torch.empty(0)

    monkeypatch.setattr(compat, "banded_attention", banded)
    monkeypatch.setattr(gpu_attention, "choose", lambda *about: KernelChoice(kernel, ""))
    monkeypatch.setattr(gpu_attention, "simulated_kind", lambda: "")
    q, k, v = (torch.randn(2, n, heads, w).bfloat16() for n, heads, w in ((queries, 4, 20), (30, 2, 20), (30, 2, 12)))
    mask = causal_mask(queries, 30, window=window)
    with simulate_device("cuda"):
        takes = attention._is_banded(q, k, v, mask, 0.0)
        assert takes == (queries > 1 or window > 0)
        if takes:
            assert attention.backend(q, k, v, mask, scale=SCALE) == kernel
            out = attention.attend(q, k, v, mask, scale=SCALE)
            torch.testing.assert_close(out, attend_reference(q, k, v, mask, scale=SCALE))
            assert (asked, library.calls) == (([(window - 1, 0)], []) if kernel == "flash" else ([], ["past"]))
        assert not attention._is_banded(q.float(), k.float(), v.float(), mask, 0.0)
        assert not attention._is_banded(q.requires_grad_(), k, v, mask, 0.0)
        packed = Mask(window, torch.zeros(2, 30, dtype=torch.int32))
        assert not attention._is_banded(q.detach(), k, v, packed, 0.0)


def test_rows_without_gradients_take_flash_4_but_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL)
    monkeypatch.setattr(gpu_attention, "problem", lambda *about: "")
    with compat.fake_tensors():
        q = torch.empty(2, 2048, 8, 64, dtype=torch.bfloat16, device="cuda")
        assert attention.gpu_kernel(q, q, q, Mask()) == "cudnn"
        with torch.no_grad():
            assert attention.gpu_kernel(q, q, q, Mask()) == "flash-4"
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert attention.gpu_kernel(q, q, q, Mask()) == "flash"


def test_a_server_says_what_attends_to_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "problem", lambda *about: "")
    monkeypatch.setattr(gpu_attention, "installed", lambda device: ALL)
    assert prompt_kernel(torch.empty(1, dtype=torch.bfloat16), 128, 128, 4) == ""
    with compat.fake_tensors():
        weight = torch.empty(1, dtype=torch.bfloat16, device="cuda")
        assert prompt_kernel(weight, 128, 128, 4).startswith("flash-4 (sm_90, bf16: 1.9 times FlashAttention 2")
        assert prompt_kernel(weight, 256, 256, 4) == "flash (heads wider than 128)"
        assert prompt_kernel(weight, 576, 576, 1) == prompt_kernel(weight.float(), 128, 128, 4) == ""


def test_the_choice_is_a_constant_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler cannot trace what it asks: a block with that inside would be compiled in two."""
    asked: list[AttentionCall] = []

    def choose(device: torch.device, dtype: torch.dtype, call: AttentionCall, group: int) -> KernelChoice:
        asked.append(call)
        return KernelChoice("flash-4", "")

    def doubled(q: Tensor, k: Tensor) -> Tensor:
        about = (q.device, q.dtype, "documents", q.shape[1], q.shape[3], k.shape[3], q.shape[2] // k.shape[2])
        return q * 2 if gpu_attention.chosen_kernel(*about, torch.is_grad_enabled()) == "flash-4" else q

    monkeypatch.setattr(gpu_attention, "choose", choose)
    q = torch.ones(2, 8, 4, 16, dtype=torch.bfloat16)
    compiled = torch.compile(doubled, backend="eager", fullgraph=True, dynamic=False)
    assert (compiled(q, q[:, :, :2]) == 2).all() and asked == [AttentionCall("documents", 8, 16, 16)]


# plans


def test_plans_take_flash_4_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_s(model: str = "llama-3.1-8b", cluster: str = "h200x1", **recipe: Any) -> float:
        asked = {"sequence": 8192, "global_batch": 2, "precision": "bf16", "document_mask": False, **recipe}
        plan = Plan(
            model=presets.model(model), cluster=presets.cluster(cluster), layout=Layout(micro_batch=2),
            recipe=Recipe(**asked),
        )  # fmt: skip
        planned = predict(plan)
        assert any("FlashAttention 4" in line for line in caveats(planned)) == speeds.takes_flash_4(plan)
        return planned.step_s

    asked: list[dict[str, Any]] = [
        {"document_mask": True}, {"model": "mistral-7b-v0.1"}, {}, {"document_mask": True, "dropout": 0.1},
        {"document_mask": True, "deterministic": True}, {"document_mask": True, "cluster": "a100x1"},
    ]  # fmt: skip
    before = [step_s(**words) for words in asked]
    monkeypatch.setattr(speeds, "has_flash_4", lambda: True)
    faster = [step_s(**words) for words in asked]
    assert [new < old for old, new in zip(before, faster, strict=True)] == [True, True, False, False, False, False]
    assert faster[2:] == before[2:]
    rate, plain = HOPPER["flash-4"], HOPPER["flash"]
    assert 1.8 < rate.forward / plain.forward < 2.0  # as published, over both passes


def flash_4_workspace(total: int, heads: int, keys: int, dim: int, documents: int) -> int:
    """Bytes that _flash_attn_bwd of 4.0.0b36 takes on Hopper: fp32 gradients of queries, two numbers a row, and, where
    heads share keys, fp32 gradients of keys and values. 64 queries and 128 keys are a tile."""
    rows = -(-(total + (documents + 1) * 64 - 1) // 64) * 64
    columns = -(-(total + (documents + 1) * 128 - 1) // 128) * 128
    return 4 * (heads * rows * (dim + 2) + (heads != keys) * 2 * keys * columns * dim)


@pytest.mark.parametrize(("heads", "keys"), [(32, 8), (32, 32), (8, 2)])
@pytest.mark.parametrize("documents", [1, 8, 64])
def test_flash_4_takes_no_more_memory_than_a_dry_run_counts(heads: int, keys: int, documents: int) -> None:
    """A dry run models FlashAttention 2; what both keep for the backward pass is the same."""
    with compat.fake_tensors():
        q, k = (torch.empty(8192, number, 128, dtype=torch.bfloat16) for number in (heads, keys))
        borders = torch.empty(documents + 1, dtype=torch.int32)
        counted = workspace_bytes(compat.varlen_backward(), (q, q, k, k, q, q, borders))
    assert flash_4_workspace(8192, heads, keys, 128, documents) <= 1.01 * counted
