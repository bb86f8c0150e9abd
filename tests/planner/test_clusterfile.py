"""Cluster files: written and read again, refused in one line, and a prediction from one by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.observe.timed_steps import threads_of, tiny_plans, with_floors
from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.speeds import DeviceCurves, Host, LinkCurves, Speeds
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.fitted_kernel import RateGrid
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.planner.machine.clusterfile import ClusterFile, MeasuredRates, load, load_named, text
from meshwright.planner.machine.overheads import fit_overheads
from meshwright.spec import Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.cluster import Device, names_file
from meshwright.spec.memory import held
from meshwright.verbs.main import main

GFLOP, GB = 1e9, 1e9
SHAPE = ModelShape(vocab=1000, layers=2, hidden=64, heads=2, ffn=128, max_positions=512)


def machine(*, share: float = 1.0, product: float = 10 * GFLOP, crowd: float = 1.0) -> ClusterFile:
    """One whose every rate is constant, so that a step can be reckoned by hand."""
    together = {}
    for ranks in (1, 2, 4):
        curves = DeviceCurves(
            products={4.0: RateGrid(((16.0, 1024.0),) * 3, (product,) * 8)},
            passes=RateGrid(((1e4, 1e8),), (2 * GB, 2 * GB)),
            attention=(
                RateGrid(((128.0, 1024.0), (64.0,)), (4 * GFLOP,) * 2),
                RateGrid(((128.0, 1024.0), (64.0,)), (5 * GFLOP,) * 2),
            ),
            update=RateGrid(((1e4, 1e8),), (1 * GB, 1 * GB)),
        )  # fmt: skip
        speeds = Speeds(
            matmul_flop_per_s=product, peak_flop_per_s=product, memory_bytes_per_s=2 * GB, product_share=share,
            memory_share=1.0, attention_forward=1.0, attention_backward=1.0, launch_s=0.0, curves=curves,
            ranks_per_core=crowd,
        )  # fmt: skip
        grid = RateGrid(((1e3, 1e6),), (1e-3, 1e-3))
        seconds = {(name, ranks): grid for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")}
        seconds["send", 2] = grid
        links = Links(per_node=ranks, link_bytes_per_s=1e9, network_bytes_per_s=1e8)
        together[ranks] = MeasuredRates(
            speeds=speeds, links=replace(links, curves=LinkCurves(seconds=seconds)) if ranks > 1 else links
        )
    stack = replace(MESHWRIGHT, host_s=0.0, step_s=0.25, hides_gradients=0.0, contention=0.0, passes=2.0)
    device = Device(name="two cores", memory_bytes=2**33, bf16_flop_per_s=product, memory_bytes_per_s=2 * GB)
    return ClusterFile(
        device=device, devices_per_node=2, rates=together, stack=stack, provenance={"date": "today", "a": 'q"uote'}
    )


def plan(measured: ClusterFile, batch: int = 4, **layout: object) -> Plan:
    laid = Layout(compile="off", **layout)  # type: ignore[arg-type]
    recipe = Recipe(sequence=256, global_batch=batch, document_mask=False)
    return Plan(model=SHAPE, recipe=recipe, layout=laid, cluster=measured.cluster(laid.world))


def test_between_points_values_lie_on_lines_of_logarithms() -> None:
    grid = RateGrid(((1.0, 100.0),), (10.0, 1000.0))
    assert (
        grid.at(10) == pytest.approx(100) and grid.at(0.1) == pytest.approx(10) and grid.at(1e9) == pytest.approx(1e3)
    )
    plane = RateGrid(((1.0, 4.0), (1.0, 9.0)), (1.0, 3.0, 2.0, 6.0))
    assert plane.at(4, 1) == pytest.approx(2) and plane.at(1, 9) == pytest.approx(3)
    assert plane.at(2, 3) == pytest.approx(6**0.5)


def test_operations_take_what_the_curves_say() -> None:
    speeds = machine(share=0.5).rates[1].speeds
    assert speeds.seconds(Product(100, 100, 100, 3, 4.0)) == pytest.approx(3 * 2e6 / (10 * GFLOP) / 0.5)
    assert speeds.seconds(MemoryPass(4e6, 2)) == pytest.approx(4e6 / (2 * GB))
    assert speeds.seconds(AttentionCore(1e9)) == pytest.approx(0.25)
    assert speeds.seconds(AttentionCore(1e9, backward=True)) == pytest.approx(0.2)
    assert replace(speeds, launch_s=1e-3).seconds(MemoryPass(0.0, 2)) == pytest.approx(2e-3)


def test_exchanges_take_what_the_curves_say() -> None:
    curves = LinkCurves(seconds={("all-reduce", 2): RateGrid(((1e3, 1e6),), (1e-3, 1e-2))})
    links = Links(per_node=4, link_bytes_per_s=1e9, network_bytes_per_s=1e8, curves=curves)
    assert links.seconds("all-reduce", 1e6, 2) == pytest.approx(1e-2)
    assert links.seconds("all-reduce", 1e2, 2) == pytest.approx(1e-3)
    assert links.seconds("all-reduce", 3e6, 2) == pytest.approx(3e-2), "beyond the last point as its bandwidth"
    assert links.seconds("all-reduce", 1e6, 4) == pytest.approx(1e-2 * 0.75 / 0.5), "other groups by what travels"
    plain = replace(links, curves=None)
    assert links.seconds("all-gather", 1e6, 2) == plain.seconds("all-gather", 1e6, 2), "not measured: as without"
    assert links.seconds("all-reduce", 1e6, 8) == plain.seconds("all-reduce", 1e6, 8), "not measured beyond the node"


def test_a_step_is_what_hand_arithmetic_says() -> None:
    """One rank, two layers: products at 10 GFLOP/s, passes at 2 GB/s twice over, attention, optimizer at 1 GB/s."""
    measured = machine()
    time = measured.estimator(plan(measured)).predict(plan(measured)).time
    tokens, hidden, ffn, vocab, layers = 4 * 256, 64, 128, 1000, 2
    weights = layers * (4 * hidden**2 + 3 * hidden * ffn) + vocab * hidden
    products = 6 * weights * tokens / (10 * GFLOP)
    core = 4 * tokens * 128 * hidden
    attention = layers * (core / (4 * GFLOP) + 2.5 * core / (5 * GFLOP))
    state, up, logit = 4 * tokens * hidden, 4 * tokens * ffn, 4 * tokens * vocab
    norms, adds, rotation, activation = 2 * 6 * state, 2 * 2 * 5 * state, 2 * 2 * 2 * state, 2 * 8 * up
    layer = norms + adds + rotation + activation
    gather = vocab * hidden * 8  # the head's gradient, summed in one chunk
    ends = 6 * state + 2 * 3 * logit + 5 * state
    assert time.compute_s == pytest.approx(products + attention + (layers * layer + ends + gather) / (2 * GB), rel=1e-6)
    parameters = weights + vocab * hidden + (2 * layers + 1) * hidden
    assert time.optimizer_s == pytest.approx(32 * parameters / GB)
    assert time.other_s == 0.25
    assert time.total_s == pytest.approx(time.compute_s + time.optimizer_s + 0.25)


def test_what_is_not_hidden_of_gradients_is_a_reduction_of_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding, two blocks, norm with head: one call, of a millisecond whatever its size, or one each."""
    measured = machine()
    laid = plan(measured, dp_replicate=2)
    time = measured.estimator(laid).predict(laid).time
    assert time.gradients_s == pytest.approx(1e-3)
    monkeypatch.setattr(held, "BUCKET_BYTES", 1)
    assert measured.estimator(laid).predict(laid).time.gradients_s == pytest.approx(4e-3)


def test_ranks_that_share_cores_fill_each_others_bubbles() -> None:
    """Four ranks on two cores: a pipeline takes no longer than its work on both cores, or than its longest path would
    on cores of its own."""
    free, crowded = machine(), machine(crowd=2.0)
    laid = plan(free, batch=2, pp=2, dp_replicate=2, micro_batch=1)
    alone = free.estimator(laid).predict(laid).time
    shared = crowded.estimator(laid).predict(laid).time
    assert alone.bubble_s > 0 > shared.bubble_s
    busy, path = alone.compute_s + alone.exchange_s, alone.compute_s + alone.exchange_s + alone.bubble_s
    least = shared.compute_s + shared.exchange_s + shared.bubble_s
    assert path / 2 <= least * (1 + 1e-9) and least <= busy


HOST = Host(
    swiglu=(1e-3, 2e-3, 1e-3), gelu=(2e-3, 3e-3, 2e-3), routed=(3e-3, 5e-3, 3e-3), expert=(1e-4, 2e-4, 1e-4)
)  # fmt: skip
FOUR = replace(SHAPE, family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=64))


@pytest.mark.parametrize(
    ("shape", "layout", "each"),
    [
        (SHAPE, {"micro_batch": 1}, 1 + 2),
        (SHAPE, {"micro_batch": 1, "recompute": "full"}, 1 + 2 + 1),
        (SHAPE, {"micro_batch": 1, "recompute": "selective"}, 1 + 2),
        (SHAPE, {"micro_batch": 1, "recompute": "selective", "kernels": "reference"}, 1 + 2 + 1),
        (replace(SHAPE, mlp="gelu_tanh"), {"micro_batch": 1}, 2 + 3),
        (FOUR, {"micro_batch": 1}, 3 + 5 + 4 * 0.3),
        (FOUR, {"micro_batch": 1, "dp_shard": 2, "ep": 2}, (3 + 5 + 2 * 0.3) / 2),
    ],
)
def test_the_host_calls_every_layer_of_every_micro_batch(
    shape: ModelShape, layout: dict[str, object], each: float
) -> None:
    """Milliseconds of two layers and four micro-batches (two of a rank where two ranks share them)."""
    plain = machine()
    called = with_host(plain, 0.5)
    laid = replace(plan(plain, **layout), model=shape)
    before, after = (variant.estimator(laid).predict(laid).time for variant in (plain, called))
    assert after.total_s - before.total_s == pytest.approx(0.5 * 2 * 4 * each * 1e-3)
    crowded = with_host(machine(crowd=2.0), 0.5)
    if laid.layout.pp == 1:
        crowded_s = crowded.estimator(laid).predict(laid).time.total_s
        assert crowded_s - before.total_s == pytest.approx(2 * (after.total_s - before.total_s))


def with_host(measured: ClusterFile, share: float) -> ClusterFile:
    together = {
        ranks: replace(rates, speeds=replace(rates.speeds, host=HOST, host_share=share))
        for ranks, rates in measured.rates.items()
    }
    return replace(measured, rates=together)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written, path = with_host(machine(share=0.8), 0.9), tmp_path / "machine.toml"
    path.write_text(text(written))
    loaded = load(path)
    assert text(loaded) == text(written) and loaded.device.memory_bytes == 2**33 and loaded.stack.passes == 2.0
    assert loaded.rates[2].speeds.host == HOST and loaded.rates[2].speeds.host_share == 0.9
    assert loaded.provenance == written.provenance and list(tmp_path.iterdir()) == [path]
    for layout in ({}, {"tp": 2}, {"pp": 2, "micro_batch": 1}, {"dp_shard": 4, "zero": 3}):
        laid = plan(written, **layout)
        mine, read = (variant.estimator(laid).predict(laid).step_s for variant in (written, loaded))
        assert read == pytest.approx(mine, rel=1e-5)


def test_names_of_files(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text(machine()))
    assert names_file(str(path)) and names_file(f"{path}x4") and not names_file("h100x8")
    assert load_named(str(path))[1].devices == 2 and load_named(f"{path}x4", 3)[1].devices == 12


CHANGES = [
    ("devices_per_node = 2", "devices_per_node = 0", "devices_per_node=0 must be"),
    ("devices_per_node = 2", "devices_pre_node = 2", "devices_pre_node is not known; nearest: devices_per_node"),
    ("[device]", "[devise]", "devise is not known; nearest: device"),
    ('name = "two cores"', "", "device.name is missing"),
    ("memory_gib = 8", "memory_gib = nan", "device.memory_gib=nan must be a finite number"),
    ("memory_gib = 8", "memory_gib = -8", "device.memory_gib=-8 must be a finite number"),
    ("memory_gib = 8", "memory_gb = 8", "device.memory_gb is not known; nearest: memory_gib"),
    ("memory_gb_per_s = 2", "memory_gb_per_s = true", "device.memory_gb_per_s=True must be"),
    ("hides_gradients = 0", "hides_gradients = 2", "stack.hides_gradients=2 is a share"),
    ("hides_gradients = 0", "hides_gradient = 0", "stack.hides_gradient is not known; nearest: hides_gradients"),
    ("[speeds.2]", "[speeds.two]", "'two' is no number of ranks"),
    ("[links.2]", "[links.3]", "[links.3] has no [speeds.3]"),
    ("[links.2.ranks_2]", "[links.2.ranks_7]", "a group has 2 to 2 ranks"),
    ("product_share = 1", "product_share = 0", "speeds.1.product_share=0 must be above 0"),
    ("passes = { bytes", "pases = { bytes", "speeds.1.pases is not known; nearest: passes"),
    ("bytes_per_s = [2e+09, 2e+09]", "bytes_per_s = [2e+09]", "passes.bytes_per_s has 1 numbers; its axes make 2"),
    ("bytes_per_s = [2e+09, 2e+09]", "bytes_per_s = [2e+09, -1]", "speeds.1.passes.bytes_per_s=-1 must be"),
    ("bytes_per_s = [2e+09, 2e+09]", "bytes_per_s = [2e+09, inf]", "speeds.1.passes.bytes_per_s=inf must be"),
    ("passes = { bytes = [10000, 1e+08]", "passes = { bytes = [10000, 1]", "passes.bytes must increase"),
    ("passes = { bytes = [10000, 1e+08], bytes_per_s = [2e+09, 2e+09] }", "", "speeds.1.passes is missing"),
    ("all-reduce = {", "all_reduce = {", "all_reduce is not known; nearest: all-reduce"),
    ("swiglu = [0.001, 0.002, 0.001]", "swiglu = [0.001, 0.002]", "speeds.1.host.swiglu must be three numbers"),
    ("swiglu = [0.001,", "swiglu = [-0.001,", "speeds.1.host.swiglu=-0.001 must be"),
    ("swiglu = [", "swigelu = [", "swigelu is not known; nearest: swiglu"),
    ("[device]", "[device", "is no TOML"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), CHANGES)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path, good = tmp_path / "machine.toml", text(with_host(machine(), 1.0))
    assert old in good
    path.write_text(good.replace(old, new, 1))
    with pytest.raises(PlanError) as caught:
        load(path)
    assert sentence in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_plan_reads_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text(machine()))
    words = ["plan", "gpt2", "--recipe", "precision=fp32", "--recipe", "sequence=512", "--recipe", "global_batch=8"]
    assert main([*words, "--cluster", f"{path}x4", "--json", "--layout", "tp=2,pp=1,micro_batch=1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["layout"]["tp"] == 2 and document["step_seconds"] > 6 * 124e6 * 8 * 512 / 4 / (10 * GFLOP)
    path.write_text("not TOML")
    for name in (str(path), str(tmp_path / "absent.toml")):
        assert main([*words, "--cluster", name]) == 2
        message = capsys.readouterr().err
        assert message.startswith(("meshwright: cluster file", "meshwright: --cluster")) and message.count("\n") == 1


def test_overheads_are_found_again() -> None:
    """Steps of a machine whose products are 0.7 as fast in training and whose steps cost 4 ms more than measured."""
    measured, true = machine(product=GFLOP), machine(product=GFLOP, share=0.7)
    true = replace(true, stack=replace(true.stack, step_s=0.254))
    layouts = (
        {},
        {"micro_batch": 1},
        {"recompute": "full"},
        {"dp_replicate": 2},
        {"tp": 2},
        {"pp": 2, "micro_batch": 1},
    )
    plans = [plan(measured, batch, **layout) for layout in layouts for batch in (4, 8)]
    seconds = [true.estimator(laid).predict(laid).step_s for laid in plans]
    fit = fit_overheads(measured, plans, seconds)
    unseen = plan(measured, 16, micro_batch=2, tp=2)
    wanted = true.estimator(unseen).predict(unseen).step_s
    before = measured.estimator(unseen).predict(unseen).step_s
    after = fit.estimator(unseen).predict(unseen).step_s
    assert abs(after / wanted - 1) < 0.05 < abs(before / wanted - 1)
    assert fit_overheads(measured, [], []) is measured


def test_what_the_host_takes_is_found_again() -> None:
    """From steps of the tiny models as a machine with that host would make them; its own step overhead is 0.25 s."""
    true = with_host(machine(), 1.0)
    measured = machine()
    plans = tiny_plans(measured)
    took = {key: true.estimator(laid).predict(laid).step_s + 2e-3 for key, laid in plans.items()}
    fit = with_floors(measured, {threads_of(ranks): took for ranks in measured.rates})
    host = fit.rates[2].speeds.host
    assert host is not None
    for name in ("swiglu", "gelu", "routed", "expert"):
        assert getattr(host, name) == pytest.approx(getattr(HOST, name), abs=1e-9), name
    assert fit.stack.step_s == pytest.approx(0.252) and fit.stack.micro_batch_s == pytest.approx(0, abs=1e-9)
