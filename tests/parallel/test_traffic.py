"""What the ledger counts beside a recorder that sees the process groups' own operations, and beside closed forms."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, case_batch
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Engine, build_engine, make_mesh
from meshwright.parallel.apply import round_weights
from meshwright.parallel.groups.group import Traffic
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape, MoEShape, num_parameters, parameters
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Batch, Share, select, split
from meshwright.training.step.evaluate import summed_loss
from meshwright.training.step.step import train_step
from tests.parallel.traffic_recorder import Seen, TrafficRecorder

Sent = dict[tuple[str, str], tuple[int, int]]
"""(axis, collective) -> (calls, bytes)."""

TWO: list[dict[str, Any]] = [
    *({"dp_shard": 2, "zero": zero, "micro_batch": 2} for zero in range(4)),
    {"dp_replicate": 2, "micro_batch": 2},
    {"dp_shard": 2, "zero": 3, "recompute": "full"},
    {"tp": 2},
    {"tp": 2, "sp": True, "recompute": "selective"},
    {"cp": 2, "zero": 2},
    {"cp": 2, "context": "all-gather", "zero": 1},
    {"pp": 2, "micro_batch": 2, "schedule": "afab"},
    {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"},
    {"dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 2},
    {"tp": 2, "sp": True, "ep": 2},
    {"cp": 2, "ep": 2, "zero": 2, "recompute": "full"},
]
TIED: list[dict[str, Any]] = [{"pp": 2, "micro_batch": 4}, {"tp": 2, "sp": True}, {"dp_shard": 2, "zero": 3}]
V_STAGES: list[dict[str, Any]] = [
    {"pp": 2, "vp": 2, "schedule": name, "micro_batch": 1} for name in ("interleaved", "zb-v", "dualpipe-v")
]
FOUR: list[dict[str, Any]] = [
    *({"dp_replicate": 2, "dp_shard": 2, "zero": zero, "micro_batch": 1} for zero in range(4)),
    {"tp": 4},
    {"tp": 4, "sp": True},
    {"cp": 4},
    {"dp_shard": 4, "zero": 3},
    {"tp": 2, "cp": 2, "sp": True, "zero": 3},
    {"tp": 2, "dp_shard": 2, "ep": 4, "sp": True, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 1},
    {"pp": 2, "tp": 2, "sp": True, "ep": 2, "micro_batch": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 1, "schedule": "zb-h1"},
    {"pp": 2, "cp": 2, "micro_batch": 1, "recompute": "full"},
]


class Run:
    """A model under a layout on this rank, to be trained step by step."""

    def __init__(self, case: Case, layout: Layout, process_groups: ProcessGroups) -> None:
        self.case, self.layout = case, layout
        self.mesh = make_mesh(layout, process_groups=process_groups)
        self.engine: Engine = build_engine(
            case.shape,
            layout,
            mesh=self.mesh,
            dtype=DTYPES[case.precision],
            reduce_dtype=torch.float32,
            micro_batches=layout.micro_batches(case.global_batch),
        )
        round_weights(self.engine, case.fake_quantize)
        self.engine.train()
        self.optimizer = Optimizer.for_engine(self.engine, case.recipe)

    def step(self) -> Sent:
        """What one training step sends."""
        before = self.mesh.traffic.snapshot()
        train_step(self.engine, self.optimizer, self._batches(), rate=1e-3, clip=1.0, balance_loss=0.01)
        return dict(self.mesh.traffic.since(before))

    def evaluate(self) -> Sent:
        """What an evaluation sends."""
        before = self.mesh.traffic.snapshot()
        summed_loss(self.engine, self._batches())
        self.engine.reshard()
        return dict(self.mesh.traffic.since(before))

    def _batches(self) -> list[Batch]:
        layout = self.layout
        share = Share(index=self.mesh.reader, parts=layout.dp, columns=self.engine.columns(self.case.sequence))
        batch = select(case_batch(self.case, 1), share)
        return split(batch, layout.micro_batch_of(self.case.global_batch))


def both(case: Case, options: list[dict[str, Any]]) -> list[tuple[Sent, Seen, dict[str, set[tuple[int, ...]]]]]:
    """Per layout: what a step told, what the recorder saw, and the ranks that an axis stands for."""
    process_groups: ProcessGroups = {}
    counts = []
    for each in options:
        run = Run(case, Layout(compile="off", **each), process_groups)
        with TrafficRecorder() as recorder:
            told = run.step()
        groups = [*run.mesh.groups.values(), *run.mesh.links.values(), *(group for _, group in run.engine.common)]
        axes: dict[str, set[tuple[int, ...]]] = {}
        for group in groups:
            axes.setdefault(group.axis, set()).add(group.ranks)
        counts.append((told, recorder.seen, axes))
    return counts


def together(axes: dict[str, set[tuple[int, ...]]]) -> list[tuple[set[str], set[tuple[int, ...]]]]:
    """Axes that have ranks in common (data and shard on two ranks, say) as one: the recorder sees ranks, not names."""
    merged: list[tuple[set[str], set[tuple[int, ...]]]] = []
    for axis, ranks in axes.items():
        names, members = {axis}, set(ranks)
        for other in [group for group in merged if group[1] & members]:
            merged.remove(other)
            names, members = names | other[0], members | other[1]
        merged.append((names, members))
    return merged


def assert_seen(told: Sent, seen: Seen, axes: dict[str, set[tuple[int, ...]]], title: str) -> None:
    assert {axis for axis, _ in told} <= set(axes) and {ranks for ranks, _ in seen} <= set().union(*axes.values())
    for names, members in together(axes):
        for kind in {kind for _, kind in (*told, *seen)}:
            ours = [count for (axis, what), count in told.items() if axis in names and what == kind]
            theirs = [count for (ranks, what), count in seen.items() if ranks in members and what == kind]
            sums = [[sum(count[i] for count in counts) for i in (0, 1)] for counts in (ours, theirs)]
            assert sums[0] == sums[1], f"{title}: {kind} over {names}: told {sums[0]}, seen {sums[1]}"


@pytest.mark.parametrize(
    ("kind", "world", "options", "precision"),
    [
        ("qwen3-30b-a3b", 2, TWO, "fp32"),
        ("qwen3-30b-a3b", 2, TWO, "bf16"),
        ("qwen2.5-0.5b", 2, TIED, "fp32"),
        ("llama-3.1-8b", 2, V_STAGES, "fp32"),
        ("qwen3-30b-a3b", 4, FOUR, "fp32"),
    ],
)
@pytest.mark.long
def test_calls_and_bytes_are_those_that_the_process_groups_see(
    kind: str, world: int, options: list[dict[str, Any]], precision: str
) -> None:
    shape = replace(shrink(kind), layers=5) if options is V_STAGES else shrink(kind)
    for rank, results in enumerate(on_ranks(world, both, Case(shape=shape, precision=precision), options)):
        for each, (told, seen, axes) in zip(options, results, strict=True):
            assert told and seen
            assert_seen(told, seen, axes, f"rank {rank} of {each}")


SHAPE = ModelShape(vocab=64, layers=4, hidden=32, heads=4, kv_heads=4, ffn=48, max_positions=16)
"""All that is split divides by 2 and by 4: no padding."""
CASE = Case(shape=SHAPE, sequence=16, global_batch=8)
ACTIVATION = 8 * 16 * 32 * 4
"""b s h elements of fp32, of the whole batch."""
N = num_parameters(SHAPE)
HEAD = sum(p.numel for p in parameters(SHAPE) if p.name.startswith(("norm.", "head.")))
SCALARS = {"data": 8, "losses": 4 + 4, "world": 4}
"""Valid tokens (float64); loss and balance loss; the squared gradient norm. One all-reduce each, once a step."""


def of_degree(n: int) -> list[dict[str, Any]]:
    """Layouts of one axis over n ranks."""
    return [
        *({"dp_shard": n, "zero": zero} for zero in range(4)),
        *({"tp": n, "micro_batch": size, "sp": sp} for size in (8, 4) for sp in (False, True)),
        {"cp": n},
        {"cp": n, "context": "all-gather"},
    ]


LAYOUTS = {
    2: [*of_degree(2), *({"dp_shard": 2, "zero": zero, "micro_batch": 1} for zero in range(4))],
    4: [
        *of_degree(4),
        {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1},
        {"pp": 4, "micro_batch": 2},
        {"pp": 4, "micro_batch": 1, "schedule": "zb-h1"},
        {"pp": 2, "tp": 2, "sp": True, "micro_batch": 2},
    ],
}
"""All that the closed forms below ask for, by number of ranks: one set of processes each."""


def sent_by(case: Case, options: list[dict[str, Any]]) -> list[Sent]:
    """What a step of each layout sends."""
    process_groups: ProcessGroups = {}
    return [Run(case, Layout(compile="off", **each), process_groups).step() for each in options]


@cache
def all_of(world: int) -> list[tuple[dict[str, Any], tuple[Sent, ...]]]:
    return list(zip(LAYOUTS[world], zip(*on_ranks(world, sent_by, CASE, LAYOUTS[world]), strict=True), strict=True))


def sent(world: int, **options: Any) -> tuple[Sent, ...]:
    """What each rank sends under one of LAYOUTS."""
    return next(ranks for each, ranks in all_of(world) if each == options)


def round_of(size: int, whole_bytes: int) -> int:
    """What a rank sends to reduce and scatter, or to gather, so many bytes: (n - 1) / n of them."""
    assert whole_bytes * (size - 1) % size == 0
    return whole_bytes * (size - 1) // size


def scalars(size: int, axis: str) -> int:
    return 2 * round_of(size, SCALARS[axis])


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.long
def test_zero_sends_what_the_lectures_say(n: int) -> None:
    """Per step and rank, with Q = (n - 1) / n x 4 N bytes: 2 Q, 2 Q, 2 Q, 3 Q."""
    quantum, head = round_of(n, 4 * N), round_of(n, 4 * HEAD)
    buckets = SHAPE.layers + 2  # blocks; embedding; norm and head: of so small a model one for replicas
    common = {(axis, "all_reduce"): (1, scalars(n, axis)) for axis in SCALARS}
    for counts in sent(n, dp_shard=n, zero=0):
        assert counts == common | {("data", "all_reduce"): (1 + 1, 2 * quantum + scalars(n, "data"))}
    for counts in (*sent(n, dp_shard=n, zero=1), *sent(n, dp_shard=n, zero=2)):
        assert counts == common | {
            ("shard", "all_gather"): (buckets, quantum),
            ("shard", "reduce_scatter"): (buckets, quantum),
        }
    for counts in sent(n, dp_shard=n, zero=3):  # norm and head stay gathered until their gradient
        assert counts == common | {
            ("shard", "all_gather"): (2 * buckets - 1, 2 * quantum - head),
            ("shard", "reduce_scatter"): (buckets, quantum),
        }


def test_zero_grows_with_the_micro_batches_as_its_stage_says() -> None:
    """m = 4 micro-batches: ZeRO-0 and 1 send no more; ZeRO-2 scatters, ZeRO-3 also gathers, each time."""
    m, quantum, head = 4, round_of(2, 4 * N), round_of(2, 4 * HEAD)
    plain, zero_1, zero_2, zero_3 = (sent(2, dp_shard=2, zero=zero, micro_batch=1)[0] for zero in range(4))
    assert plain["data", "all_reduce"][1] == 2 * quantum + scalars(2, "data")
    assert (zero_1["shard", "all_gather"][1], zero_1["shard", "reduce_scatter"][1]) == (quantum, quantum)
    assert (zero_2["shard", "all_gather"][1], zero_2["shard", "reduce_scatter"][1]) == (quantum, m * quantum)
    assert zero_3["shard", "all_gather"][1] == m * (2 * quantum - head)
    assert zero_3["shard", "reduce_scatter"][1] == m * quantum


def test_in_bf16_parameters_travel_in_two_bytes_and_sums_in_four() -> None:
    """ZeRO-0: 2 Q as in fp32. ZeRO-1, 2: Q / 2 to gather, Q a reduction; ZeRO-3 gathers twice, but for norm
    and head. Two micro-batches."""
    quantum, head = round_of(2, 4 * N), round_of(2, 4 * HEAD)
    options: list[dict[str, Any]] = [{"dp_shard": 2, "zero": zero, "micro_batch": 2} for zero in range(4)]
    for stages in on_ranks(2, sent_by, replace(CASE, precision="bf16"), options):
        assert stages[0]["data", "all_reduce"][1] == 2 * quantum + scalars(2, "data")
        for counts, scatters in zip(stages[1:], (1, 2, 2), strict=True):
            assert counts["shard", "reduce_scatter"][1] == scatters * quantum
        gathered = [counts["shard", "all_gather"][1] for counts in stages[1:]]
        assert gathered == [quantum // 2, quantum // 2, 2 * (2 * quantum - head) // 2]


def test_hybrid_sharding_sums_shards_over_replicas_once() -> None:
    """A replica's ranks as ZeRO does; then 2 (r - 1) / r of a shard."""
    quantum = round_of(2, 4 * N)
    for counts in sent(4, dp_replicate=2, dp_shard=2, zero=2, micro_batch=1):
        assert counts["shard", "all_gather"][1] == quantum and counts["shard", "reduce_scatter"][1] == 2 * quantum
        assert counts["replicate", "all_reduce"] == (SHAPE.layers + 2, 2 * round_of(2, 4 * N // 2))


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("size", [8, 4])
def test_tensor_parallelism_sends_four_activations_a_layer(t: int, size: int) -> None:
    """A layer: 4 all-reduces of b s h; embedding and head: one more each. With sp the same bytes, as all-gathers and
    reduce-scatters, 2 all-gathers more a layer, since slices are kept and not what they gather to, and once a step the
    norms' gradients. The loss: three numbers a position."""
    times, passes, positions = 4 * SHAPE.layers + 2, 8 // size, 8 * 16
    loss = 2 * round_of(t, 3 * positions * 4)
    for counts in sent(t, tp=t, micro_batch=size, sp=False):
        assert counts["tp", "all_reduce"] == ((times + 2) * passes, 2 * round_of(t, times * ACTIVATION) + loss)
        assert counts["world", "all_reduce"] == (1, scalars(t, "world")) and len(counts) == 2
    norms = 2 * round_of(t, (2 * SHAPE.layers + 1) * SHAPE.hidden * 4)
    for counts in sent(t, tp=t, micro_batch=size, sp=True):
        for kind, number in (("all_gather", times + 2 * SHAPE.layers), ("reduce_scatter", times)):
            assert counts["tp", kind] == (number * passes, round_of(t, number * ACTIVATION))
        assert counts["tp", "all_reduce"] == (2 * passes + 1, loss + norms)


@pytest.mark.parametrize("c", [2, 4])
def test_context_parallelism_sends_keys_and_values_hop_by_hop(c: int) -> None:
    """A layer: c - 1 hops of this rank's keys and values forward, backward those again and their gradients."""
    hop = 2 * 8 * (16 // c) * SHAPE.kv_heads * SHAPE.head_dim * 4
    for counts in sent(c, cp=c):
        assert counts["cp", "send"] == (3 * (c - 1) * SHAPE.layers, 3 * (c - 1) * hop * SHAPE.layers)
    for counts in sent(c, cp=c, context="all-gather"):
        assert counts["cp", "all_gather"] == (2 * SHAPE.layers, 2 * (c - 1) * hop * SHAPE.layers)
        assert counts["cp", "reduce_scatter"] == (SHAPE.layers, (c - 1) * hop * SHAPE.layers)


def test_a_pipeline_sends_an_activation_and_its_gradient_over_each_border() -> None:
    plain, late = sent(4, pp=4, micro_batch=2), sent(4, pp=4, micro_batch=1, schedule="zb-h1")
    for rank in range(4):
        borders = (rank < 3) + (rank > 0)
        assert plain[rank]["pp", "send"] == (4 * borders, borders * ACTIVATION)
        assert late[rank]["pp", "send"] == (8 * borders, borders * ACTIVATION)
    for counts in sent(4, pp=2, tp=2, sp=True, micro_batch=2):  # a tp rank has its slice of the sequence
        assert counts["pp", "send"] == (4, ACTIVATION // 2)


def test_experts_are_sent_tokens_four_times() -> None:
    """Every token to every expert: (e - 1) / e of k N rows there and back, and the same in the backward pass; 8 bytes
    for each expert of others tell how many."""
    moe = MoEShape(experts=4, top_k=4, ffn=16)
    case = replace(CASE, shape=replace(SHAPE, layers=2, family="mixtral", moe=moe))
    for layouts in on_ranks(4, sent_by, case, [{"dp_shard": 4, "ep": 2}, {"dp_shard": 4, "ep": 4}]):
        for e, counts in zip((2, 4), layouts, strict=True):
            exchange_passes = 4 * round_of(e, moe.top_k * 8 * 16 // 4 * SHAPE.hidden * 4)
            numbers = 8 * moe.experts * (e - 1) // e
            assert counts["ep", "all_to_all"] == (5 * 2, 2 * (exchange_passes + numbers))


def test_traffic_remembers_the_last_call_and_counts_between_snapshots() -> None:
    traffic = Traffic()
    assert (traffic.last, traffic.calls_begun) == ("", 0)
    traffic.tell("tp", "all_reduce", 12)
    before = traffic.snapshot()
    traffic.tell("tp", "all_reduce", 30)
    traffic.tell("pp", "send", 5)
    traffic.begin("pp", "receive")
    assert (traffic.last, traffic.calls_begun) == ("receive on pp", 4)
    assert traffic.since(before) == {("tp", "all_reduce"): (1, 30), ("pp", "send"): (1, 5)}
    assert traffic.snapshot() == {("tp", "all_reduce"): (2, 42), ("pp", "send"): (1, 5)}


def test_one_device_sends_nothing() -> None:
    run = Run(CASE, Layout(compile="off"), {})
    assert run.step() == {} and run.mesh.traffic.calls_begun == 0


def test_the_closed_forms_count_whole_tensors() -> None:
    """The shape of these tests has no padding: every first dim divides by four."""
    assert all(p.shape[0] % 4 == 0 and prod(p.shape) == p.numel for p in parameters(SHAPE))
