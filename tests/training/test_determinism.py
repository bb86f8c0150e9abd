"""What recipe.deterministic changes in a step on a GPU: which operations, which kernels, and that it is said."""

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright
from meshwright import compat
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.oracle.features import shrink
from meshwright.observe.program import TrainingProgram
from meshwright.parallel import make_mesh
from meshwright.spec import Layout, Plan, Recipe
from meshwright.training import device, loop
from meshwright.training.records import run_notes
from tests.training import running

GPU = torch.device("cuda")
PLAN = Plan(
    model=shrink("llama-3.1-8b"),
    recipe=Recipe(sequence=64, global_batch=4, precision="bf16", deterministic=True),
    layout=Layout(micro_batch=2),
)


class Operations(TorchDispatchMode):
    """Counts operations by their names, without overloads and the mark of those in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function).split(".")[1].rstrip("_")] += 1
        return function(*args, **(kwargs or {}))


def documented() -> tuple[set[str], set[str]]:
    """Names of the operations that torch's own documentation says to be slower, and to be refused."""
    _, slower, refused = " ".join((torch.use_deterministic_algorithms.__doc__ or "").split()).split(
        "The following normally"
    )
    return tuple(  # type: ignore[return-value]  # two of them
        {name.rpartition(".")[2].rstrip("_") for name in re.findall(r":(?:func|class):`([\w.]+)`", part)}
        for part in (slower, refused.partition("In addition")[0])
    )


def of_a_step(name: str) -> Counter[str]:
    """The operations of a step as a GPU runs it, on tensors without values."""
    plan = replace(PLAN, model=shrink(name), layout=Layout(micro_batch=2, compile="off"))
    with compat.fake_world(0, 1), compat.fake_tensors(), simulate_device("cuda"):
        program = TrainingProgram(
            plan=plan, mesh=make_mesh(plan.layout), device=torch.device("cpu"), on_part=lambda part: None, routing=1.0,
            documents=True, acts_as="cuda",
        )  # fmt: skip
        program.build()
        with Operations() as operations:
            program.step(1, 2)
    return operations.seen


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("llama-3.1-8b", set()),
        ("gpt2-124m", set()),
        ("qwen3-30b-a3b", {"gather", "scatter", "scatter_add", "index_select"}),
    ],
)
def test_only_attention_and_a_router_have_operations_of_which_torch_has_two(name: str, slower: set[str]) -> None:
    """`slower` is of a router: numbers of tokens and experts. Rows of experts are added in a kernel of this package."""
    changed, refused = documented()
    assert {"index_add", "gather", "index_put"} <= changed and {"NLLLoss", "bincount", "cumsum"} <= refused
    seen = of_a_step(name)
    assert seen["_flash_attention_backward"] + seen["_scaled_dot_product_efficient_attention_backward"] > 0
    # Quantized tensors alone may not be resized.
    assert changed & seen.keys() == slower and not (refused - {"resize"}) & seen.keys()
    assert not {"index_add", "index_put"} & seen.keys(), "gradients of rows are added by nothing else either"


def test_no_kernel_of_this_package_adds_by_atomics() -> None:
    """They are added in the order in which programs come, which no two runs have in common."""
    folder = Path(meshwright.__file__).parent / "kernels" / "triton"
    names = {node.attr for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Attribute)}  # fmt: skip
    assert {"store", "load", "dot"} <= names and not {name for name in names if name.startswith("atomic")}


def test_blocks_run_uncompiled_unless_asked_for() -> None:
    assert device.deterministic_plan(PLAN, GPU).layout.compile == "off"
    for unchanged in (
        replace(PLAN, layout=replace(PLAN.layout, compile="on")),
        replace(PLAN, recipe=replace(PLAN.recipe, deterministic=False)),
        replace(PLAN, recipe=replace(PLAN.recipe, products="fp8")),
    ):
        assert device.deterministic_plan(unchanged, GPU) == unchanged
    assert device.deterministic_plan(PLAN, torch.device("cpu")) == PLAN, "a CPU repeats its bits anyway"


def test_a_run_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.device.kernel_notes", lambda *arguments: [])
    monkeypatch.setattr("meshwright.training.records.is_compiled", lambda layout, device: layout.compile == "on")
    monkeypatch.setattr("meshwright.training.records.compile_notes", lambda *arguments: [])

    def notes(plan: Plan, target: torch.device = GPU) -> str:
        return "\n".join(run_notes(plan, target, steps_done=0, length="steps", changes=""))

    sentences = notes(device.deterministic_plan(PLAN, GPU))
    assert (
        "recipe.deterministic=true costs speed: attention's backward pass" in sentences
        and "run uncompiled" in sentences
    )
    assert "compiled blocks take kernels" in notes(replace(PLAN, layout=replace(PLAN.layout, compile="on")))
    assert "costs speed" not in notes(replace(PLAN, recipe=replace(PLAN.recipe, deterministic=False)))
    assert "costs speed" not in notes(PLAN, torch.device("cpu"))


def test_a_run_keeps_the_plan_that_it_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = running.write_texts(tmp_path / "text")
    choose = device.deterministic_plan
    monkeypatch.setattr(device, "deterministic_plan", lambda plan, target: choose(plan, GPU))
    monkeypatch.setattr(device, "prepare", lambda *arguments, **options: None)
    notes = running.Notes()
    loop.run(running.plan(texts, tmp_path / "run", steps=1, deterministic=True), watchers=[notes])
    assert notes.info is not None and notes.info.plan.layout.compile == "off"


def test_the_compiler_chooses_without_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "deterministic", False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)  # of a torch that leaves it to others
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    device.prepare(torch.device("cpu"), "fp32", deterministic=True)
    assert inductor.deterministic
