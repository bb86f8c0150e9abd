"""Checks of the engine itself, on a tiny model and on small tensors.

One cold step of every pipeline schedule, every axis against one device, a checkpoint with random states, the speed of a
real step. Kernels are compared with plain fp64 arithmetic, and the speed of products with the data sheet.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import Kernels, fast
from meshwright.kernels.attention import gpu
from meshwright.kernels.attention.attend import UNKNOWN, DocumentSpans, Mask, attend_reference, causal_mask
from meshwright.kernels.experts.experts import expert_linear_reference, groups_on_device
from meshwright.kernels.loss.cross_entropy import linear_cross_entropy_reference
from meshwright.kernels.quantized import device_products
from meshwright.kernels.quantized.device_products import ProductContest
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.observe.oracle.feature_matrix import DENSE, Trial, from_arrays, outcomes_of, trial
from meshwright.observe.oracle.one_device import BANDS, first_difference, outcome
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.observe.rates import synchronize
from meshwright.observe.timed_steps import Timing, step_s
from meshwright.parallel.groups.group import Group
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import NAMES
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.execution import LEAST_POSITIONS, MAJORS, AttentionCall, Case
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.weights.inventory import token_flop
from meshwright.store import checkpoint
from meshwright.store.checkpoint import rng_state, set_rng_state
from meshwright.training import device as train_device
from meshwright.training.device import known_device
from meshwright.verbs.doctor.findings import Finding, failure, ok, skipped, warning
from meshwright.verbs.doctor.network import RankFailure, gather_from_all, run_everywhere

COLD_S = 60.0
"""Time after which a step of a tiny model counts as hanging, in seconds."""
SCHEDULES = tuple(f"pp {name}" for name in NAMES)
AXES = ("zero 0", "zero 3", "tp", "tp + sp", "cp ring", "cp gather")
SMALL = ModelShape(
    name="200M", vocab=32000, layers=12, hidden=1024, heads=16, kv_heads=16, ffn=2816, max_positions=2048
)
"""Model that measures the speed of a GPU."""
SMALLER = replace(SMALL, name="10M", vocab=8192, layers=4, hidden=256, heads=4, kv_heads=4, ffn=704)
"""Model that measures the speed of a CPU."""
LOW_MFU = 0.15
BARS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest allowed relative error by dtype: a few roundings. TF32 products are not compared."""
SLOW = 0.6
"""Share of a known GPU's best measured product rate below which something slows it."""
LENGTH = 256

Run = Callable[..., list[Any]]
"""Same signature as observe.ranks.on_ranks."""


def check_schedules(kind: str, most: int, run: Run = on_ranks) -> Finding:
    """Run one cold step of each pipeline schedule in fresh processes: hangs occur in the first step."""
    return _compare_with_one_device("schedules", SCHEDULES, kind, most, run, cold=True)


def check_axes(kind: str, most: int, run: Run = on_ranks) -> Finding:
    """Compare two steps along each axis with one device."""
    return _compare_with_one_device("axes", AXES, kind, most, run, cold=False)


def _compare_with_one_device(
    check: str, names: Sequence[str], kind: str, most: int, run: Run, *, cold: bool
) -> Finding:
    """Compare layouts with one device. `cold` starts new processes for each layout."""
    if most < 2:
        return skipped(check, "two processes are needed, and there is one GPU")
    trials = [candidate for candidate in map(trial, ([name] for name in names)) if isinstance(candidate, Trial)]
    # Compilation would take minutes per layout, and a hang shows without it.
    trials = [replace(candidate, layout=replace(candidate.layout, compile="off")) for candidate in trials]
    case = replace(DENSE, steps=1 if cold else 2)
    alone = outcome(case, Layout(compile="off"), device=kind)
    wrong: dict[str, str] = {}
    # A hang of lazily created connections shows only in the first step of a fresh process.
    for batch in [[candidate] for candidate in trials] if cold else [trials]:
        try:
            limit_s = COLD_S * (1 if cold else len(batch))
            cases = [(case, candidate.layout) for candidate in batch]
            ranks = run(2, outcomes_of, cases, kind, limit_s=limit_s, device=kind)
        except RankError as error:
            # Ranks that failed together share one message, since nobody knows which layout it was.
            # observe/ranks.py says so of a rank that missed its deadline.
            hangs = "did not answer" in str(error)
            message = f"hangs (no step in {COLD_S:.0f} s)" if hangs else _last_line(error)
            wrong |= {candidate.title: message for candidate in batch}
            continue
        for index, candidate in enumerate(batch):
            difference = first_difference(alone, [from_arrays(rank[index]) for rank in ranks], BANDS["fp32"])
            if difference:
                wrong[candidate.title] = difference
    if wrong:
        name, message = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        advice = "do not train with it; report it with this file (NCCL_DEBUG=WARN shows more)"
        return failure(check, f"{name}: {message}{more}", advice, wrong=wrong)
    return ok(check, f"{', '.join(candidate.title for candidate in trials)} equal one device", tried=len(trials))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def check_checkpoint(device: torch.device, folder: Path, world: Group | None = None) -> Finding:
    """Save and load tensors and random states below `folder`, which all ranks of `world` must share."""
    world = world or Group("world")
    try:
        return _save_and_load(device, folder, world)
    except RankFailure as error:
        return failure("checkpoint", f"none could be made: {error}", "give a folder that all ranks can write (--runs)")


def _save_and_load(device: torch.device, folder: Path, world: Group) -> Finding:
    rank = world.index

    def begin() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            "weight": torch.randn(64, 33, generator=generator).to(device),
            "step": torch.zeros((), device=device),
        }
        # The draw below continues from exactly these states, so a restored run must repeat it.
        states, values = rng_state(rank)
        before = {name: x.clone() for name, x in (tensors | states).items()}
        expected = _draw(device)
        folder.mkdir(parents=True, exist_ok=True)
        return tensors | states, before, dict(values), expected

    # Each part that can fail on one rank alone runs on all, so that all give up together.
    saving, before, values, expected = run_everywhere(world, begin)
    # Rank 0 names the folder for all: each rank would otherwise test a folder of its own.
    scratch_name = run_everywhere(world, lambda: tempfile.mkdtemp(prefix=".doctor-", dir=folder) if rank == 0 else "")
    scratch = Path(gather_from_all(world, scratch_name)[0])

    def save() -> Path:
        return checkpoint.save(
            scratch, step=1, tensors=saving, values=values, score=None, keep_last=1, group=world.process_group
        )

    def load(saved: Path) -> dict[str, torch.Tensor]:
        # Zeros instead of copies: a load that writes nothing must not pass.
        loaded = {name: torch.zeros_like(x) for name, x in before.items()}
        checkpoint.load(saved, loaded, group=world.process_group)
        return loaded

    try:
        # A folder on a local disk exists on one node only, and checkpoints of many nodes need a shared one.
        seen = gather_from_all(world, run_everywhere(world, scratch.is_dir))
        if blind_ranks := [other for other, sees in enumerate(seen) if not sees]:
            advice = "keep runs in a folder that all nodes share"
            return failure("checkpoint", f"rank {blind_ranks[0]} does not see the folder that rank 0 made", advice)
        saved = run_everywhere(world, save)
        loaded = run_everywhere(world, lambda: load(saved))
    finally:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    # Restored states must give the numbers that were drawn right after they were saved.
    set_rng_state(loaded, values, rank)
    different = [name for name, x in before.items() if not torch.equal(loaded[name], x)]
    if not torch.equal(_draw(device), expected):
        different.append("what is drawn afterwards")
    if different:
        return failure(
            "checkpoint", f"came back different: {', '.join(different)}", "try another disk; resuming here is not exact"
        )
    return ok("checkpoint", "tensors and random states come back to the bit")


def _draw(device: torch.device) -> torch.Tensor:
    return torch.cat((torch.rand(4), torch.rand(4, device=device).cpu()))


def check_step_speed(device: torch.device, seconds_of_step: float = 0.0) -> Finding:
    """Time a real step of a small model, as a share of the device's peak where that is known."""
    gpu = device.type == "cuda"
    shape, sequence, batch = (SMALL, 2048, 8) if gpu else (SMALLER, 256, 4)
    recipe = Recipe(sequence=sequence, global_batch=batch, precision="bf16" if gpu else "fp32")
    # Uncompiled and without graphs, since the check should find slow hardware in seconds.
    plan = Plan(model=shape, recipe=recipe, layout=Layout(compile="off", cuda_graphs="off"))
    took = seconds_of_step or step_s(plan, Timing(seconds=2.0, least=2, most=6), device.type)
    rate = sequence * batch / took
    summary = f"{rate:,.0f} tokens/s with a model of {shape.name}"
    peak = train_device.peak_flop_per_s(device, recipe.precision, plan.cluster.device)
    if not peak:
        return ok("step", summary, tokens_per_s=rate)
    mfu = rate * token_flop(shape, sequence, causal=True).training / peak
    figures = {"tokens_per_s": rate, "mfu_causal": mfu}
    if mfu < LOW_MFU:
        return warning(
            "step",
            f"{summary}, MFU {mfu:.0%} (causal)",
            "see products and compiler above: one of them slows it",
            **figures,
        )
    return ok("step", f"{summary}, MFU {mfu:.0%} (causal)", **figures)


@dataclass(frozen=True, slots=True)
class Form:
    """One use of attention: sizes of q, k and v, and the mask."""

    heads: int
    keys: int
    width: int
    values: int
    packed: bool = False
    window: int = 0
    positions: int = LENGTH


FORMS = {
    "causal": Form(4, 4, 64, 64),
    "grouped (GQA)": Form(8, 2, 64, 64),
    "long rows": Form(8, 2, 128, 128, positions=LEAST_POSITIONS),
    "packed documents": Form(4, 4, 64, 64, packed=True),
    "latent (MLA)": Form(4, 4, 96, 64),
    "packed, grouped": Form(8, 2, 64, 64, packed=True),
    "packed, latent": Form(4, 4, 96, 64, packed=True),
    "packed, odd heads": Form(4, 2, 20, 20, packed=True),
    "window": Form(8, 2, 64, 64, window=50),
    "packed, window": Form(4, 4, 64, 64, packed=True, window=50),
}


def check_attention(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Finding:
    """Check every form of attention, forward and backward."""
    attend = (kernels or fast()).attend
    worst: dict[str, float] = {}
    used: dict[str, str] = {}
    for name, form in FORMS.items():
        sizes = ((form.heads, form.width), (form.keys, form.width), (form.keys, form.values))
        length = form.positions
        tensors = [_random((2, length, *size), device, dtype, seed) for seed, size in enumerate(sizes)]
        # Borders at multiples of 100 lie inside the tiles of every kernel, where a wrong mask shows.
        documents = (torch.arange(length, device=device) // 100).expand(2, -1) if form.packed else None
        spans = DocumentSpans(6, 100) if form.packed else UNKNOWN
        mask = causal_mask(length, length, window=form.window, documents=documents, spans=spans, device=device)

        # The mask is bound as a default: a closure would see the mask of the last form.
        def plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            return attend_reference(q, k, v, mask, scale=0.1)

        def ours(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            attended: Tensor = attend(q, k, v, mask, scale=0.1)
            return attended

        worst[name] = _error(ours, plain, tensors)
        q, k, v = tensors
        used[name] = _backend(partial(ours, q, k, v), device)
    return _judge(
        "attention", worst, BARS[dtype], {"backends": used}, _backend_names(used) + _flash_2_reasons(device, dtype)
    )


def check_flash_parts(device: torch.device, dtype: torch.dtype) -> Finding:
    """Check the fused kernel with its log-sum-exp, from which context parallelism combines parts."""
    if not compat.has_flash_attention(device.type):
        return skipped("attention by parts", "this torch has no fused kernel that returns the log-sum-exp")
    q, k, v = (_random((2, 4, LENGTH, 64), device, dtype, seed) for seed in range(3))
    out, lse = compat.flash_attention(q, k, v, causal=False, scale=0.1, device=device.type)
    scores = torch.einsum("bhse,bhte->bhst", q.double(), k.double()) * 0.1
    expected = {"result": scores.softmax(-1) @ v.double(), "log-sum-exp": scores.logsumexp(-1)}
    computed = {"result": out, "log-sum-exp": lse}
    worst = {name: _relative(computed[name], expected[name]) for name in expected}
    gradient = _random(tuple(out.shape), device, dtype, 7)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    recomputed = (torch.einsum("bhse,bhte->bhst", *leaves[:2]) * 0.1).softmax(-1) @ leaves[2]
    exact = torch.autograd.grad(recomputed, leaves, gradient.double())
    ours = compat.flash_attention_backward(gradient, q, k, v, out, lse, causal=False, scale=0.1, device=device.type)
    worst |= {f"gradient of {n}": _relative(a, b) for n, a, b in zip("qkv", ours, exact, strict=True)}
    return _judge("attention by parts", worst, BARS[dtype])


def check_experts(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Finding:
    """Check products of a mixture of experts. Experts without tokens must get zero gradients."""
    product = (kernels or fast()).expert_linear
    # Experts without tokens lie in between: their gradients were left unset by some grouped kernels.
    counts = [40, 0, 24, 0, 64]
    rows = _random((sum(counts), 64), device, dtype, 0)
    weights = _random((len(counts), 32, 64), device, dtype, 1)
    # Grouped kernels read the counts on the device, and the loop over experts reads them on the host.
    on_device = torch.tensor(counts, device=device)
    grouped = groups_on_device(rows, weights)

    def engine_product(x: Tensor, w: Tensor) -> Tensor:
        rows_out: Tensor = product(x, w, on_device if grouped else counts)
        return rows_out

    def plain_product(x: Tensor, w: Tensor) -> Tensor:
        return expert_linear_reference(x, w, counts)

    leaves = [x.detach().clone().requires_grad_() for x in (rows, weights)]
    engine_product(*leaves).sum().backward()
    gradient = leaves[1].grad
    empty = [n for n, count in enumerate(counts) if not count and gradient is not None and gradient[n].any()]
    if empty:
        return failure(
            "experts", f"experts {empty} had no token and got a gradient that is not zero",
            "update torch (pytorch issue 172439), or train without grouped products: layout.kernels=reference",
        )  # fmt: skip
    worst = {"products": _error(engine_product, plain_product, [rows, weights])}
    return _judge("experts", worst, BARS[dtype], {"grouped": grouped}, "grouped products" if grouped else "one by one")


def check_loss(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Finding:
    """Check the fused head and loss."""
    targets = torch.arange(64, device=device) % 50
    # The ignored target of cross-entropy: it must count neither in the loss nor in the mean.
    targets[3] = -100
    cross_entropy = (kernels or fast()).linear_cross_entropy
    worst = {
        "head and loss": _error(
            lambda x, w: cross_entropy(x, w, targets),
            lambda x, w: linear_cross_entropy_reference(x, w, targets),
            [_random((64, 32), device, dtype, 0), _random((50, 32), device, dtype, 1)],
        )
    }
    return _judge("loss", worst, BARS[dtype])


def check_products(device: torch.device, dtype: torch.dtype, flop_per_s: float = 0.0) -> Finding:
    """Compare the speed of a large product with that of a known GPU. `flop_per_s` of 0 = measure it."""
    rate = flop_per_s or product_flop_per_s(device, dtype)
    shown = f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
    summary = f"{shown} in {str(dtype).removeprefix('torch.')}"
    preset = known_device(device)
    best = preset.half_matmul_flop_per_s or preset.half_flop_per_s if preset else 0.0
    # Presets hold 16-bit rates, so fp32 has nothing to be compared with.
    if best and dtype != torch.float32 and rate < SLOW * best:
        return warning(
            "products", f"{summary}: {rate / best:.0%} of what this GPU reaches elsewhere",
            "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE tells what slows it; end other programs on it",
            flop_per_s=rate,
        )  # fmt: skip
    return ok("products", summary, flop_per_s=rate)


def check_quantized_products(
    device: torch.device, make: Callable[[Callable[[str], None]], ProductContest] | None = None, size: int = 4096
) -> Finding:
    """Hold the contest of 4-bit products that `serve` holds at its start, for one matrix of size x size.

    The finding names the competitors, the winner and the time it takes.

    Args:
        make: Returns the contest for a function that prints. None = all ways of a GPU, including those that need a
            second layout (serve --second-layouts).
    """
    name = "4-bit products"
    if device.type != "cuda" and make is None:
        return skipped(name, "ways of multiplying with 4-bit codes are timed on a GPU alone")
    lines: list[str] = []
    contest = make(lines.append) if make else device_products.new_contest(copies=True, say=lines.append)
    weight = _random((size, size), device, torch.bfloat16, 0)
    matrix = quantize_matrix(name, weight, SCHEMES["int4-rtn"], None, torch.bfloat16)
    began = time.perf_counter()
    # Two rows are the shape of decoding, where serving spends its time.
    out = contest.product(weight[:2].contiguous(), matrix, None)
    seconds = time.perf_counter() - began
    contest.close()
    sentence = f"{lines[0]}; the contest takes {seconds:.1f} s for each size of matrix at the start of serve"
    if out is None:
        return failure(name, sentence, "no way is right: serve models in bf16, and report this line")
    return ok(name, sentence, contest_seconds=seconds)


def product_flop_per_s(device: torch.device, dtype: torch.dtype, rounds: int = 5) -> float:
    """Return the median rate of a square product: 8192 on a GPU, 1024 on a CPU."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    durations_s = []
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        durations_s.append(time.perf_counter() - began)
    # The first product includes the choice of a kernel and the clocks rising.
    return 2.0 * size**3 / statistics.median(durations_s[1:])


def _random(size: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _error(ours: Callable[..., Tensor], plain: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """Return the largest relative error of output and gradients, compared with the plain form in fp64."""
    computed: list[Tensor] = []
    expected: list[Tensor] = []
    for function, inputs, collected in ((ours, tensors, computed), (plain, [x.double() for x in tensors], expected)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        collected += [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    return max(_relative(a, b) for a, b in zip(computed, expected, strict=True))


def _relative(computed: Tensor, expected: Tensor) -> float:
    error = (computed.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _judge(
    check: str, worst: Mapping[str, float], bar: float, figures: Mapping[str, object] | None = None, more: str = ""
) -> Finding:
    name = max(worst, key=lambda key: worst[key])
    summary = f"largest error {worst[name]:.1e} ({name}), allowed {bar:.0e}"
    # Written this way round so that NaN fails too.
    if not worst[name] <= bar:
        return failure(
            check, summary, "layout.kernels=reference avoids the kernel; report it with this file", errors=dict(worst)
        )
    return ok(check, f"{summary}{f'; {more}' if more else ''}", errors=dict(worst), **(figures or {}))


def _backend(run: Callable[[], Tensor], device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize(device)
    # Torch does not tell which backend it took; the names of its kernels do.
    names = " ".join(event.key.lower() for event in profiler.key_averages())
    # Order matters: the name of FlashAttention 4 also contains "flash".
    kernels_by_word = {
        "cudnn": "cudnn",
        "flash_attncute": "flash-4",
        "flash": "flash",
        "fmha": "efficient",
        "efficient": "efficient",
    }
    return next((kernel for word, kernel in kernels_by_word.items() if word in names), "plain products")


def _flash_2_reasons(device: torch.device, dtype: torch.dtype) -> str:
    """Return why FlashAttention 2 runs where a faster kernel is known. Empty = it does not."""
    cases_by_reason: dict[str, list[Case]] = {}
    for case in get_args(Case) if gpu.installed(device).major in MAJORS else ():
        kernel, reason = gpu.choose(device, dtype, AttentionCall(case, LEAST_POSITIONS, 128, 128), 4)
        if kernel == "flash":
            cases_by_reason.setdefault(reason, []).append(case)
    return "".join(f"; FlashAttention 2 for {', '.join(cases)}: {why}" for why, cases in cases_by_reason.items())


def _backend_names(used: Mapping[str, str]) -> str:
    kinds = sorted(set(used.values()))
    if kinds == ["cpu"]:
        return ""
    return "kernels: " + ", ".join(f"{name} {kernel}" for name, kernel in used.items())
