"""Sums of gradients that take products (kernels/linear/weight_gradients.py), in every layout.

A CPU that is told to work as a GPU gives the bits of rounded gradients. The bytes moved for the sums are counted.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshwright import compat
from meshwright.kernels.linear import cpu_product, weight_gradients
from meshwright.kernels.linear.weight_gradients import GradientSum
from meshwright.model import Transformer
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.oracle.feature_matrix import DENSE, EVERY_EXPERT
from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, ModelShape, Plan, Recipe, presets

CASES = {
    "dense": Case(shape=DENSE.shape, precision="bf16"),
    "experts": Case(shape=EVERY_EXPERT.shape, precision="bf16"),
    "fp8": Case(shape=DENSE.shape, precision="bf16", products="fp8-all"),
}
Asked = tuple[str, dict[str, Any]]
ALONE: list[tuple[Asked, bool]] = [
    (("dense", {"micro_batch": 2}), True),
    (("dense", {"micro_batch": 2, "recompute": "full"}), True),
    (("dense", {"micro_batch": 8}), False),
    (("experts", {"micro_batch": 2}), True),
    (("fp8", {"micro_batch": 2}), False),
]
PAIRS: list[tuple[Asked, bool]] = [
    (("dense", {"dp_replicate": 2, "micro_batch": 2}), True),
    (("dense", {"dp_replicate": 2, "micro_batch": 4}), True),
    (("dense", {"dp_shard": 2, "zero": 1, "micro_batch": 2}), True),
    (("dense", {"dp_shard": 2, "zero": 1, "micro_batch": 4}), True),
    (("dense", {"dp_shard": 2, "zero": 2, "micro_batch": 2}), False),
    (("dense", {"dp_shard": 2, "zero": 3, "micro_batch": 2}), False),
    (("dense", {"cp": 2, "zero": 1, "micro_batch": 2}), True),
    (("dense", {"tp": 2, "sp": True, "micro_batch": 2}), True),
    (("dense", {"tp": 2, "micro_batch": 2, "recompute": "full"}), True),
    (("dense", {"pp": 2, "micro_batch": 2, "schedule": "1f1b"}), True),
    (("dense", {"pp": 2, "micro_batch": 2, "schedule": "zb-h1"}), True),
    (("experts", {"dp_shard": 2, "ep": 2, "zero": 1, "micro_batch": 2}), True),
]
"""With whether any sum takes a product."""


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """With an attribute that is another, in a process of its own too."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _compared(options: list[Asked]) -> list[tuple[RankOutcome, RankOutcome, int]]:
    """Of each layout: as sums take products, as they do not, and how many products they took."""
    process_groups: ProcessGroups = {}
    results = []
    add = GradientSum.add_product
    for case, each in options:
        layout, both, taken = Layout(compile="off", **each), [], Counter[str]()

        def counted(total: GradientSum, product: Any, taken: Counter[str] = taken) -> None:
            taken["products"] += 1
            add(total, product)

        for devices in ({"cpu"}, set()):
            with (
                changed(compat, "cpu_multiplies", lambda dtype: True),
                changed(GradientSum, "add_product", counted),
                changed(weight_gradients, "ADDING_DEVICES", devices),
            ):
                both.append(outcome(CASES[case], layout, process_groups=process_groups))
        results.append((both[0], both[1], taken["products"]))
    return results


def _check(results: list[tuple[RankOutcome, RankOutcome, int]], options: list[tuple[Asked, bool]]) -> None:
    for (summed, other, taken), (asked, takes) in zip(results, options, strict=True):
        assert bool(taken) == takes, asked
        assert summed.losses == other.losses and summed.norms == other.norms, asked
        for name, (_, tensor) in summed.tensors.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(other.tensors[name][1])), (asked, name)


def test_one_rank_keeps_every_bit() -> None:
    _check(_compared([asked for asked, _ in ALONE]), ALONE)


def test_two_ranks_keep_every_bit() -> None:
    for results in on_ranks(2, _compared, [asked for asked, _ in PAIRS]):
        _check(results, PAIRS)


class _Pass:
    """Forward and loss of random tokens."""

    size = (1, 7)

    def __init__(self, vocab: int) -> None:
        self.tokens = torch.randint(0, vocab, self.size)

    def __call__(self, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
        out, losses = model.stage(x, self.tokens, self.tokens)
        return out, losses.cross_entropy


class WeightTraffic(TorchDispatchMode):
    """Bytes that are moved of gradients of matrices and of their sums, and kernels that do it. An operand of a product
    is not among them."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        super().__init__()
        self.shapes = {tuple(matrix.shape) for matrix in matrices} | {tuple(matrix.shape[::-1]) for matrix in matrices}
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if isinstance(out, Tensor) and tuple(out.shape) in self.shapes and name in ("mm", "add_", "copy_"):
            read = {"mm": [], "add_": list(args[:2]), "copy_": [args[1]]}[name]
            self.add(out.nbytes + sum(tensor.nbytes for tensor in read))
        return out

    def add(self, size: int) -> None:
        self.bytes += size
        self.launches += 1


@pytest.mark.parametrize(
    ("devices", "first", "further", "launches"), [(set(), 8, 12, 2), ({"cuda"}, 4, 8, 1)], ids=["before", "now"]
)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_bytes_and_kernels_of_a_step(
    micro_batches: int, devices: set[str], first: int, further: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of a GPU, of each element of a layer's matrices: of a step's first micro-batch and of others."""
    monkeypatch.setattr(weight_gradients, "ADDING_DEVICES", devices)
    monkeypatch.setattr(weight_gradients, "device_kind", lambda x: "cuda")
    shape = shrink("llama-3.1-8b")
    engine = build_engine(
        shape, Layout(compile="off"), dtype=torch.bfloat16, reduce_dtype=torch.float32, micro_batches=micro_batches
    )
    matrices = [
        parameter
        for name, parameter in engine.parameters.items()
        if name.startswith("layers.") and parameter.dim() == 2
    ]
    traffic, add = WeightTraffic(matrices), cpu_product.add_product

    def counted(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
        if tuple(total.shape) not in traffic.shapes:
            return add(total, a, b, beta)
        traffic.add(total.nbytes * (1 + beta))
        with _disable_current_modes():
            return add(total, a, b, beta)

    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: True)
    monkeypatch.setattr(cpu_product, "add_product", counted)
    with traffic:
        engine.forward_backward([_Pass(shape.vocab) for _ in range(micro_batches)])
    elements = sum(parameter.numel() for parameter in matrices)
    assert traffic.bytes == elements * (first + (micro_batches - 1) * further)
    assert traffic.launches == len(matrices) * micro_batches * launches


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "zb-h1"}, {"tp": 2, "sp": True}, {"dp_shard": 4, "zero": 1}],
    ids=str,
)
@pytest.mark.long
def test_no_gradient_of_a_weight_is_held(layout: dict[str, Any]) -> None:
    """Few tokens and a small head: one matrix's gradient in 16 bits would be 1.5 % of the peak."""
    shape = ModelShape(layers=4, hidden=1024, heads=16, kv_heads=4, ffn=4096, vocab=512, max_positions=64)
    recipe = Recipe(sequence=64, global_batch=4 * layout.get("dp_shard", 1), precision="bf16", document_mask=False)
    asked = Plan(
        model=shape, layout=Layout(compile="off", micro_batch=1, **layout), recipe=recipe,
        cluster=presets.cluster("h100x8"),
    )  # fmt: skip
    planned, run = predict(asked).memory[0], dry_run(asked, ranks=[0], device="cuda")
    assert planned.total_bytes - planned.kinds["reserve"] == pytest.approx(run.peak_bytes, rel=0.003), planned.when
