"""Plans that cannot fit are refused before anything is made; those that can are not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import DoesNotFit
from meshwright.spec.memory.held import memory
from meshwright.spec.recipe.recipe import BatchStage
from meshwright.training import fits
from meshwright.training.fits import MachineMemory, check_fits, machine_memory

CPU = torch.device("cpu")
TINY = Plan(model=presets.model("llama-tiny"), recipe=Recipe(), layout=Layout())


def _have(patch: pytest.MonkeyPatch, available_bytes: int, total_bytes: int = 0) -> None:
    memory = MachineMemory(total_bytes=total_bytes or available_bytes, available_bytes=available_bytes)
    patch.setattr(fits, "machine_memory", lambda: memory)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(TINY, model=presets.model("llama-3.1-405b")), ("optimizer states", "a smaller model")),
        (
            replace(TINY, model=replace(TINY.model, ffn=2**30), recipe=Recipe(sequence=16, global_batch=1)),
            ("optimizer states", "a smaller model"),
        ),
        (replace(TINY, recipe=Recipe(sequence=2**24, global_batch=4096)), ("activations", "layout.micro_batch")),
        (
            replace(TINY, recipe=Recipe(sequence=2**20, global_batch=2**22), layout=Layout(micro_batch=1)),
            ("tokens of a step", "recipe.global_batch"),
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_figures(plan: Plan, words: tuple[str, ...]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        check_fits(plan, CPU)
    assert all(word in str(refused.value) for word in (*words, "rank 0", "GiB"))
    assert refused.value.exit_code == 3


def test_a_micro_batch_that_nobody_meant() -> None:
    with pytest.raises(DoesNotFit, match="activations"):
        check_fits(replace(TINY, recipe=Recipe(sequence=64, global_batch=200_000)), CPU)


def test_gradients_and_activations_of_one_micro_batch_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are made as activations go: a plan whose two peaks fit one after the other is not refused."""
    plan = replace(TINY, recipe=Recipe(sequence=8192, global_batch=16))
    states = sum(memory(plan.model, plan.layout, "fp32")["update"].values())
    gradients = memory(plan.model, plan.layout, "fp32")["update"]["gradients"]
    _have(monkeypatch, 1)
    with pytest.raises(DoesNotFit) as refused:
        check_fits(plan, CPU)
    needed = fits._rank_needs(plan, 0, "cuda")
    assert needed.states == states and needed.activations > 0 and "activations" in str(refused.value)
    twice = fits._rank_needs(replace(plan, layout=Layout(micro_batch=8)), 0, "cuda")
    assert twice.total == states + (needed.total - states + gradients) / 2


def test_sharding_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, 30 * 2**30)
    large = replace(TINY, model=presets.model("llama-3.1-8b"), recipe=Recipe(precision="bf16", global_batch=64))
    with pytest.raises(DoesNotFit):
        check_fits(large, CPU)
    check_fits(replace(large, layout=Layout(dp_shard=8, zero=3, micro_batch=1)), CPU, machines=8)
    check_fits(replace(large, layout=Layout(tp=4, pp=2, micro_batch=1)), CPU, machines=8)
    with pytest.raises(DoesNotFit, match=r"the 8 ranks of this machine 1.* GiB together"):
        check_fits(replace(large, layout=Layout(dp_shard=8, zero=3, micro_batch=1)), CPU)


@pytest.mark.parametrize(("layers", "worst"), [(5, "rank 0"), (4, "rank 1")], ids=["three layers", "a norm more"])
def test_the_worst_stage_is_named(layers: int, worst: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, 2**20)
    uneven = replace(
        TINY, model=replace(TINY.model, layers=layers, tied=False, vocab=256), layout=Layout(pp=2, micro_batch=1)
    )
    with pytest.raises(DoesNotFit, match=f"{worst} needs"):
        check_fits(uneven, CPU)


def test_the_largest_step_of_a_ramp_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _have(monkeypatch, 200 * 2**20)
    small = replace(TINY, recipe=Recipe(sequence=256, global_batch=2))
    check_fits(small, CPU)
    ramp = (BatchStage(tokens=10_000, global_batch=512),)
    with pytest.raises(DoesNotFit, match="activations"):
        check_fits(replace(small, recipe=replace(small.recipe, batch_ramp=ramp)), CPU)


def test_the_copy_of_a_background_save_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(sequence=16, global_batch=1, steps=50, checkpoint_every=10)
    plain, behind = (replace(TINY, recipe=recipe, layout=Layout(saving=saving)) for saving in ("sync", "async"))  # type: ignore[arg-type]
    least = fits._rank_needs(plain, 0, "cpu")
    _have(monkeypatch, least.total + 2**20)
    check_fits(plain, CPU)
    with pytest.raises(DoesNotFit, match=r"copy for layout\.saving=async"):
        check_fits(behind, CPU)
    check_fits(replace(behind, recipe=replace(recipe, checkpoint_every=0)), CPU)  # no save before the last step


def test_what_others_use_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that would hold the plan, were it empty."""
    need = fits._rank_needs(TINY, 0, "cpu").total
    _have(monkeypatch, need - 2**20, total_bytes=4 * need)
    with pytest.raises(DoesNotFit, match="are available"):
        check_fits(TINY, CPU)


def test_ranks_of_a_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(TINY, layout=Layout(dp_replicate=2))
    need = fits._rank_needs(two, 0, "cpu").total
    _have(monkeypatch, int(1.5 * need))
    with pytest.raises(DoesNotFit, match="the 2 ranks of this machine"):
        check_fits(two, CPU)
    check_fits(two, CPU, machines=2)


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    9000 kB\nSwapFree:        2000 kB\n"


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 16000, 9000),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/memory.max": "max\n",
          "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "10",
          "sys/fs/cgroup/a/memory.max": f"{8000 * 1024}", "sys/fs/cgroup/a/memory.current": f"{5000 * 1024}",
          "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {500 * 1024}\nactive_file {500 * 1024}\n"},
         8000, 4000),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/memory.max": f"{4000 * 1024}",
          "sys/fs/cgroup/memory.current": f"{3500 * 1024}"}, 4000, 500),
        ({"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
          "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{6000 * 1024}",
          "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2000 * 1024}",
          "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 7\ntotal_inactive_file {1000 * 1024}\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "1"}, 6000, 5000),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{1000 * 1024}",
          "sys/fs/cgroup/memory.current": f"{2000 * 1024}"}, 1000, 0),
    ],
    ids=["no group", "a group above, its cache counts as free", "in a container", "the first kind", "beyond its limit"],
)  # fmt: skip
def test_available_memory_is_what_kernel_and_control_groups_leave(
    files: dict[str, str], total: int, available: int, tmp_path: Path
) -> None:
    memory = machine_memory(_machine(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert (memory.total_bytes, memory.available_bytes, memory.swap_bytes) == (
        total * 1024,
        available * 1024,
        2000 * 1024,
    )


V2 = {
    "proc/self/cgroup": "0::/a\n",
    "sys/fs/cgroup/a/memory.max": f"{8000 * 1024}",
    "sys/fs/cgroup/a/memory.current": f"{5000 * 1024}",
}
V1 = {
    "proc/self/cgroup": "4:memory:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6000 * 1024}",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2000 * 1024}",
}


def _swap(first: object, second: object, kind: int = 2) -> dict[str, str]:
    names = (
        ("a/memory.swap.max", "a/memory.swap.current"),
        ("memory/memory.memsw.limit_in_bytes", "memory/memory.memsw.usage_in_bytes"),
    )[kind == 1]
    return {f"sys/fs/cgroup/{name}": str(text) for name, text in zip(names, (first, second), strict=True)}


@pytest.mark.parametrize(
    ("files", "available", "swap"),
    [
        (V2, 3000, 2000),
        (V2 | _swap("max", 0), 3000, 2000),
        (V2 | _swap(0, 0), 3000, 0),
        (V2 | _swap(1500 * 1024, 1000 * 1024), 3000, 500),
        (V2 | _swap(1000 * 1024, 1500 * 1024), 3000, 0),
        ({**V2, "sys/fs/cgroup/a/memory.max": "max"} | _swap(0, 0), 9000, 0),
        (V1 | _swap(6000 * 1024, 2000 * 1024, 1), 4000, 0),
        (V1 | _swap(6500 * 1024, 2000 * 1024, 1), 4000, 500),
        (V1 | _swap(6500 * 1024, 3000 * 1024, 1), 3500, 0),
        (V1 | _swap("9223372036854771712", 3000 * 1024, 1), 4000, 2000),
    ],
    ids=[
        "no file of swap", "no limit", "none allowed", "what is left of it", "beyond its limit",
        "a limit of swap alone",
        "the first kind, memory and swap in one", "more of both", "both used up by swap", "the first kind, no limit",
    ],
)  # fmt: skip
def test_swap_is_what_kernel_and_control_groups_leave(
    files: dict[str, str], available: int, swap: int, tmp_path: Path
) -> None:
    """A process beyond what its group may swap is killed, however much the machine has."""
    memory = machine_memory(_machine(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert (memory.available_bytes, memory.swap_bytes) == (available * 1024, swap * 1024)


def test_without_proc_all_memory_counts(tmp_path: Path) -> None:
    memory = machine_memory(tmp_path)
    assert memory.available_bytes == memory.total_bytes > 2**28


def test_this_machine_has_less_available_than_in_all() -> None:
    memory = machine_memory()
    assert 0 < memory.available_bytes < memory.total_bytes
