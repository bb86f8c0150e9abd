"""DeepSeek-V3 as trained, beside its report (arXiv:2412.19437): hours, what a layer keeps, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

import meshwright
from meshwright.planner.accuracy.published_stacks import HAI_LLM
from meshwright.planner.cost.block import layer
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.spec import presets
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.layout.layout import Layout
from meshwright.verbs.main import main
from meshwright.verbs.plan.answer import PlanAnswer

RECIPE = {"sequence": 4096, "global_batch": 15360, "optimizer_states": "bf16"}


@pytest.fixture(scope="module")
def as_trained() -> PlanAnswer:
    return meshwright.plan(
        "deepseek-v3", cluster="h800x8", nodes=256, stack="hai-llm", recipe=RECIPE, layout={"pp": 16, "ep": 64},
        tokens="14.8T",
    )  # fmt: skip


def test_the_hours_are_those_of_the_report(as_trained: PlanAnswer) -> None:
    """Table 1: 2,664K H800 hours for 14.8T tokens; section 3: 180K hours, 3.7 days on 2,048, per trillion."""
    bill = as_trained.budget
    assert bill is not None
    assert bill.device_hours == pytest.approx(2_664e3, rel=0.02)
    assert bill.days / 14.8 == pytest.approx(3.7, rel=0.02)
    assert as_trained.best.step_seconds == pytest.approx(180e3 * 3600 / 2048 * 15360 * 4096 / 1e12, rel=0.02)


def test_it_fits_in_80_gb_as_it_did(as_trained: PlanAnswer) -> None:
    best = as_trained.best
    assert best.plan.layout.schedule == "dualpipe-v" and best.plan.layout.dp_shard == 128
    assert best.peak_bytes < 80e9 and not best.tight


def test_a_layer_of_experts_keeps_what_the_report_says() -> None:
    """Section 3.3.3: fp8 inputs of experts and of SwiGLU, attention's output in 12 bits, no up-projection, no norm."""
    tokens, hidden, heads = 4096, 7168, 128
    shape = presets.model("deepseek-v3")
    layer_bytes = layer(local_shape(shape, HAI_LLM, Layout(ep=64), tokens, 1, 2), routed=True).kept_bytes("none")
    stream = 2 * tokens * hidden * 2  # inputs of both norms, in 16 bit
    low_ranks = tokens * (1536 + 512 + 64) * 2
    attention = tokens * heads * 128 * 1.5 + tokens * heads * 4  # and a log-sum-exp
    experts = 8 * tokens * (hidden + 2 * 2048) + tokens * 2 * 2048  # eight routed, one shared
    router = tokens * 256 * 4 * 2 + 8 * tokens * (8 + 8 + 4)  # scores, order
    assert layer_bytes == pytest.approx(stream + low_ranks + attention + experts + router)
    names = {tensor.name for tensor in layer(local_shape(shape, HAI_LLM, Layout(), tokens, 1, 2), routed=True).tensors}
    assert {name for name, _ in HAI_LLM.kept_shares} <= names


def test_with_the_outputs_of_experts_it_would_not_fit(as_trained: PlanAnswer) -> None:
    """The one assumption about memory that the report does not state, and the page's figure for it."""
    from meshwright.planner.step.predict import predict

    shares = tuple(share for share in HAI_LLM.kept_shares if share[0] != "returned")
    stack = replace(HAI_LLM, name="hai-llm, outputs kept", kept_shares=shares, product_bytes=1.0)
    assert predict(as_trained.plan, stack).peak_bytes / 2**30 == pytest.approx(81.4, abs=0.05)


def test_what_is_kept_changes_no_time(as_trained: PlanAnswer) -> None:
    from meshwright.planner.step.predict import predict

    whole = predict(as_trained.plan, replace(HAI_LLM, name="hai-llm, all kept", kept_shares=(), product_bytes=1.0))
    assert whole.step_s == as_trained.best.step_seconds
    assert whole.peak_bytes > 2 * as_trained.best.peak_bytes


def test_this_engine_names_the_term_that_does_not_fit_and_the_cheapest_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "dp_shard=128,zero=1,pp=16,schedule=dualpipe-v,vp=2,ep=64,micro_batch=1,recompute=none,tp=1,cp=1"
    asked = ["plan", "deepseek-v3", "--cluster", "h800x8", "--nodes", "256"]
    recipe = ",".join(f"{key}={value}" for key, value in RECIPE.items())
    assert main([*asked, "--recipe", recipe, "--layout", words]) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert "largest: activations" in error
    assert "cheapest fixes: layout.dp_shard=32 layout.tp=4 layout.sp=true" in error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["llama-3.1-8b"], "llama-3.1-8b lacks latent attention with experts"),
        (["deepseek-v3", "--layout", "tp=2"], "has tp=2, and hai-llm has 1"),
        (["deepseek-v3", "-o", "folder"], "is for files, and hai-llm has no public ones"),
        (["--from", "arguments.sh"], "has no public files"),
    ],
)
def test_what_it_lacks_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words, "--for", "hai-llm", "--cluster", "h800x8", "--nodes", "16"]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("folder").exists()


def test_a_batch_that_is_too_small_names_one_that_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "deepseek-v3", "--for", "hai-llm", "--cluster", "h800x8", "--nodes", "256"]
    assert main([*words, "--recipe", "sequence=4096,global_batch=512"]) == 2
    batch = capsys.readouterr().err.strip().partition("for 512 sequences per step: take --recipe global_batch=")[2]
    assert main([*words, "--recipe", f"sequence=4096,global_batch={batch}", "--json"]) == 0
    assert main([*words, "--recipe", f"sequence=4096,global_batch={int(batch) // 2}"]) != 0
    capsys.readouterr()
    assert main([*words, "--layout", "ep=65"]) == 2
    assert capsys.readouterr().err.strip().endswith("on 2048 devices with ep=65")


def test_an_unknown_software_is_told_of_it() -> None:
    with pytest.raises(MeshwrightError, match="hai-llm"):
        meshwright.plan("deepseek-v3", cluster="h800x8", nodes=16, stack="hai")
