"""`meshwright plan`: the answer, its document, the saved plan, and errors."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import planfile
from meshwright.interface.planning.plan_request import requested_plan
from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.recommend import cheapest_fixes, is_bold, on_half, recommend
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import Layout, presets
from meshwright.spec.plan.plan import world_violation
from meshwright.spec.recipe.recipe import BatchStage
from meshwright.verbs.main import main
from tests.verbs.toy import call

SMALL = ["plan", "llama-3.2-1b", "--cluster", "h100x8", "--recipe", "global_batch=64", "--recipe", "sequence=4096"]
ONE = [*SMALL, "--layout", "dp=8,dp_shard=8,zero=3,tp=1,cp=1,pp=1,micro_batch=1,recompute=full"]
DOCUMENT = {
    "source", "plan", "peak_bytes", "peak_rank", "memory", "traffic", "time", "step_seconds",
    "tokens_per_second_per_device", "mfu_causal", "mfu_full", "hfu", "bubble_fraction", "caveats",
}  # fmt: skip


def test_the_document_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--recipe", "sequence=32768", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() >= DOCUMENT | {"layouts", "rejected"}
    assert document["source"] == "predicted"
    assert sum(part["bytes"] for part in document["memory"]) == pytest.approx(document["peak_bytes"], rel=1e-6)
    assert sum(part["seconds"] for part in document["time"]) == pytest.approx(document["step_seconds"], rel=1e-9)
    tokens = document["plan"]["recipe"]["global_batch"] * document["plan"]["recipe"]["sequence"]
    assert document["tokens_per_second_per_device"] == pytest.approx(tokens / document["step_seconds"] / 8)
    times = [layout["step_seconds"] for layout in document["layouts"]]
    assert times[0] == document["step_seconds"] and times == pytest.approx(sorted(times), rel=1e-2)
    assert document["rejected"] and all(
        rejection["reason"] and rejection["count"] for rejection in document["rejected"]
    )


def test_a_field_that_no_search_varies_is_set_by_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain attention stores a x s x s weights: 34 sbh of 34 sbh + 5 a s^2 b stay (Korthikanti et al. 2022), 30 %.

    This package's plain norms also keep their inputs in fp32, 8 sbh for both: 34 % stay.
    """
    gpt3 = ["plan", "gpt3-175b", "--cluster", "h100x8", "--nodes", "16", "--json", "--layout"]
    layout = "tp=8 sp pp=8 interleaved vp=12 dp_shard=2 zero=1 micro_batch=1 kernels=reference"
    stored = {}
    for recompute in ("none", "selective"):
        code, out, _ = call(capsys, *gpt3, f"{layout} recompute={recompute}")
        document = json.loads(out)
        assert code == 0 and document["plan"]["layout"]["kernels"] == "reference"
        stored[recompute] = next(row["bytes"] for row in document["memory"] if row["kind"] == "activations")
    assert stored["selective"] / stored["none"] == pytest.approx(42 / (42 + 5 * 96 * 2048 / 12288), abs=0.02)


@pytest.mark.parametrize("choice", ["kernels=reference", "overlap=off", "compile=off"])
def test_a_choice_of_this_engine_is_refused_for_another(choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes nothing there, so an answer would be that of the layout without it."""
    code, _, error = call(capsys, *SMALL, "--for", "megatron-lm", "--layout", f"tp=2 {choice}")
    assert code == 2 and "is a choice of Meshwright's engine, not of megatron-lm: leave it out" in error


def test_one_layout_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["layouts"]) == document["legal"] == 1
    assert document["plan"]["layout"]["recompute"] == "full" and document["plan"]["layout"]["dp_shard"] == 8


def test_words_say_what_fits_and_how_fast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*SMALL, "--tokens", "1T", "--price", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].startswith("  FITS  ") and " of 78.4 GiB" in printed
    for words in (
        "(recommended",
        "MFU",
        "Also possible",
        "Limit of this layout: sequence ",
        "1T tokens",
        "at $2 per device-hour",
        "layouts searched",
        "--save plan.yaml",
    ):
        assert words in printed, words
    assert "Half the devices" not in printed
    assert main([*SMALL, "--details"]) == 0
    printed = capsys.readouterr().out
    for words in ("Half the devices", "optimizer moments", "Time of a step", "Rejected", "provably no faster"):
        assert words in printed, words


def test_the_saved_plan_is_the_best_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    assert main([*SMALL, "--save", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    saved = planfile.read(file)
    assert saved.violations() == []
    assert saved.layout.tp == document["plan"]["layout"]["tp"] and saved.recipe.global_batch == 64
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(document["step_seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "llama-3.1-8", "--cluster", "h100x8"], "nearest: llama-3.1-8b"),
        (["plan", "llama-3.1-8b", "--cluster", "h10x8"], "--cluster h10x8 is not known; nearest: h100"),
        (
            ["plan", "llama-3.1-8b", "--cluster", "h100x0"],
            "--cluster h100x0: a node has 1 to 65,536 devices, as h100x8",
        ),
        (["plan", "llama-3.1-8b"], "--cluster is missing"),
        ([*SMALL, "--nodes", "0"], "--nodes 0 must be at least 1"),
        ([*SMALL, "--nodes", "-3"], "--nodes -3 must be at least 1"),
        ([*SMALL, "--recipe", "sequence=-4"], "recipe.sequence=-4 must be at least 1"),
        ([*SMALL, "--recipe", "sequenc=4"], "nearest"),
        ([*SMALL, "--recipe", "nonsense"], "is not KEY=VALUE"),
        ([*SMALL, "--layout", "plan"], "--layout plan is for 1 device, and the cluster has 8 (1 x 8)"),
        ([*SMALL, "--layout", "dp=3"], "which does not divide the 8 devices"),
        ([*SMALL, "--layout", "tpp=2"], "nearest: tp"),
        ([*SMALL, "--layout", "tp=0"], "whole number of 1 or more"),
        ([*SMALL, "--layout", "recompute=some"], "none or norms or selective or all-but-attention or full"),
        ([*SMALL, "--tokens", "many"], "--tokens many must be a number of 1 or more"),
        ([*SMALL, "--price", "-1"], "--price -1 must be"),
        ([*SMALL, "--tokens", "0.5"], "--tokens 0.5 must be a number of 1 or more"),
        ([*SMALL, "--price", "2"], "as --tokens 15T"),
        ([*SMALL, "--nodes", "999999999999"], "at most 131,072"),
        ([*SMALL, "--layout", "ep=2"], "layout.ep=2 spreads experts, and the model has none: take layout.ep=1"),
        ([*SMALL, "--layout", "tp=8,dp=1,zero=3"], "zero=3 shards over dp_shard x cp, which is one rank"),
        ([*SMALL, "--layout", "pp=2,vp=40"], "stages exceed the model's 16 layers"),
        ([*SMALL, "--layout", "micro_batch=5"], "recipe.global_batch=64 is not micro_batch=5 x accumulation"),
        ([*SMALL, "--layout", "sp=true,tp=1"], "take layout.sp=false or a larger tp"),
        ([*SMALL, "--layout", "zero=5"], "zero takes 0 or 1 or 2 or 3"),
        ([*SMALL, "--layout", "dp_replicate=16"], "16, which does not divide the 8 devices"),
        ([*SMALL, "--layout", "dp=4,dp_shard=8"], "8 does not divide it"),
        ([*SMALL, "--layout", "tp=8,tp=4"], "--layout has tp=8 and tp=4"),
        ([*SMALL, "--layout", "tp=8", "--layout", "tp=4"], "--layout has tp=8 and tp=4"),
        ([*SMALL, "--layout", "pp=1,schedule=zb-v"], "the order of a pipeline, and pp=1"),
        ([*SMALL, "--recipe", "noise_scale_every=10"], "compares micro-batches on one device"),
        (
            ["plan", "llama-3.2-1b", "--cluster", "local"],
            "has no figures for memory_bytes, memory_bytes_per_s, bf16_flop_per_s",
        ),
        (["plan", "llama-3.2-1b", "--cluster", "rtx4090x2", "--nodes", "2"], "has no figures for network_bytes_per_s"),
        (["plan", "./no/such/folder", "--cluster", "h100x8"], "MODEL ./no/such/folder does not exist: give a preset"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def predicted(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("pp=2,dp_shard=4,tp=1,cp=1,zero=3", {"zero": 3, "pp": 2, "dp_shard": 4}),
        ("dp_shard=8,zero=0,micro_batch=1,recompute=full", {"zero": 0, "dp_shard": 8}),
        ("pp=2,schedule=zb-h1,vp=2,micro_batch=1", {"schedule": "zb-h1", "vp": 2}),
        ("dp=1,tp=8,micro_batch=99,recompute=full", {"micro_batch": 99, "tp": 8}),
        ("dp=2x4 zero=3 micro_batch=1", {"dp_replicate": 2, "dp_shard": 4}),
        ("dp=1 tp=4 sp pp=2 interleaved vp=4 micro_batch=1", {"sp": True, "schedule": "interleaved", "vp": 4}),
    ],
)
def test_every_legal_layout_has_its_ledger(
    layout: str, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Layouts outside the search are answered when asked for, and printed layouts can be asked for."""
    planned_layout = predicted([*SMALL, "--layout", layout], capsys)["plan"]["layout"]
    assert {name: planned_layout[name] for name in fields} == fields


def test_a_huge_batch_does_not_hang(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "global_batch=1000000000,sequence=8192", "--layout", "dp=8,micro_batch=1,zero=3"]
    assert predicted(["plan", "llama-3.2-1b", "--cluster", "h100x8", *words], capsys)["layouts"]


def test_without_a_batch_a_step_has_about_four_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    for nodes in (1, 3, 2048):
        words = ["plan", "llama-3.2-1b", "--cluster", "h100x8", "--nodes", str(nodes)]
        asked = requested_plan(words[1], words[3], nodes, [])
        assert 2.8e6 < asked.recipe.global_batch * asked.recipe.sequence < 5.7e6
    assert predicted(["plan", "llama-3.1-405b", *words[2:], "--layout", "tp=8,pp=16,cp=1"], capsys)["layouts"]


@pytest.mark.parametrize(
    ("cluster", "command"),
    [
        ("h100x8", "torchrun --nproc_per_node 8 -m"),
        (
            "h100x4 --nodes 2",
            "torchrun --nnodes 2 --nproc_per_node 4 --max_restarts 3 --rdzv_backend c10d --rdzv_endpoint",
        ),
        ("h100x16", "torchrun --nproc_per_node 16 -m"),
        ("h100", "Command: meshwright train"),
    ],
)
def test_the_command_starts_all_processes(
    cluster: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    words = ["plan", "llama-3.2-1b", "--cluster", *cluster.split(), "--recipe", "global_batch=64,sequence=4096"]
    assert main([*words, "--layout", "micro_batch=1,tp=1,cp=1,pp=1", "--save", str(file)]) == 0
    assert command in " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    saved = planfile.read(file)
    assert world_violation(saved, saved.cluster.devices) is None


def test_the_saved_plan_has_the_steps_of_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    assert main([*ONE, "--tokens", "1B", "--save", str(file)]) == 0
    assert planfile.read(file).recipe.steps == -(-(10**9) // (64 * 4096))
    assert planfile.read(file, ["recipe.steps=2"]).recipe.rising_steps == 0  # it follows
    assert "3,815 steps" in capsys.readouterr().out


def test_a_ramp_is_planned_for_all_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, file, saved = predicted(SMALL, capsys)["plan"], tmp_path / "ramp.yaml", tmp_path / "saved.yaml"
    made["recipe"]["batch_ramp"] = [{"tokens": 10**6, "global_batch": 96}]
    made["layout"] |= {"context": "all-gather", "compile": "off", "kernels": "reference"}
    file.write_text(json.dumps(made))
    assert main(["plan", str(file), "--save", str(saved)]) == 0
    capsys.readouterr()
    plan = planfile.read(saved)
    assert plan.violations() == []
    assert (plan.layout.context, plan.layout.compile, plan.layout.kernels) == ("all-gather", "off", "reference")
    assert main(["plan", str(file), "--save", str(file)]) == 2
    nodes = predicted(["plan", str(saved), "--nodes", "2"], capsys)
    assert nodes["plan"]["cluster"]["nodes"] == 2
    same = predicted(["plan", str(saved), "--layout", "plan"], capsys)
    assert same["legal"] == 1 and same["plan"]["layout"] == json.loads(json.dumps(asdict(plan.layout)))


def test_the_memory_of_a_ramp_is_that_of_its_largest_step() -> None:
    asked = requested_plan("llama-3.2-1b", "h100x8", None, ["global_batch=8", "sequence=4096"])
    layout = Layout(dp_shard=1, pp=8, schedule="afab", micro_batch=1)
    small = replace(asked, layout=layout)
    ramp = replace(small, recipe=replace(small.recipe, batch_ramp=(BatchStage(tokens=1, global_batch=32),)))
    large = replace(small, recipe=replace(small.recipe, global_batch=32))
    assert predict(ramp).peak_bytes == predict(large).peak_bytes > predict(small).peak_bytes


def test_fixes_are_the_layouts_that_were_measured() -> None:
    asked = requested_plan("llama-3.1-8b", "h100x8", None, ["global_batch=512", "sequence=8192"])
    large = replace(asked, layout=Layout(dp_replicate=8, micro_batch=1))
    fixes = cheapest_fixes(build_estimator(large), large, 20)
    assert fixes
    for change in fixes:
        words = dict(word.removeprefix("layout.").split("=") for word in change.what.split())
        changed = {k: {"true": True, "false": False}.get(v, int(v) if v.isdecimal() else v) for k, v in words.items()}
        assert replace(large.layout, **changed) == change.prediction.plan.layout
        assert change.prediction.plan.layout.world == 8


def test_odd_machines_have_no_half() -> None:
    for devices, nodes, half in ((8, 3, False), (3, 1, False), (8, 2, True), (4, 1, True), (1, 1, False)):
        cluster = presets.cluster(f"h100x{devices}", nodes)
        asked = replace(requested_plan("llama-3.2-1b", "h100x8", None, ["global_batch=48"]), cluster=cluster)
        ranking = on_half(build_estimator(asked), asked)
        assert (ranking is not None) is half
        if ranking and ranking.best:
            assert 2 * ranking.best[0].plan.layout.world == cluster.devices


def test_an_example_of_what_is_too_large_can_be_any_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layout that passes the closed forms and fails in the played schedule."""
    made = predicted(["plan", "llama-3.1-8b", "--cluster", "h100x4", "--recipe", "global_batch=6,sequence=4096",
                      "--layout", "pp=1,recompute=full"], capsys)["plan"]  # fmt: skip
    made["cluster"]["device"]["memory_bytes"] = 64 * 10**9
    file = tmp_path / "key.yaml"
    file.write_text(json.dumps(made))
    layout = "pp=4,vp=2,schedule=interleaved,micro_batch=1,recompute=none"
    assert main(["plan", str(file), "--layout", layout]) in (0, 3)
    assert "KeyError" not in capsys.readouterr().err


def test_nothing_fits_is_exit_code_3_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-405b", "--cluster", "h100x8"]) == 3
    error = capsys.readouterr().err
    assert (
        "the nearest needs" in error
        and " is usable: " in error
        and "take more nodes" in error
        and error.count("\n") == 1
    )


def test_a_sequence_beyond_the_positions_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    llama = ["plan", "llama-2-7b", "--cluster", "h100x8", "--recipe"]
    assert main([*llama, "sequence=8192,global_batch=64"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "sequences of 8,192 tokens exceed the 4,096 positions the model is meant for." in printed
    assert main([*llama, "sequence=4096,global_batch=64"]) == 0
    assert "exceed" not in capsys.readouterr().out
    assert main(["plan", "gpt2", "--cluster", "h100x8", "--recipe", "sequence=2048"]) == 2
    assert "1024 learned positions of the model: take recipe.sequence=1024" in capsys.readouterr().err


def test_degrees_that_are_not_to_blame_are_not_to_be_freed(capsys: pytest.CaptureFixture[str]) -> None:
    one_device = ["plan", "llama-3.1-8b", "--cluster", "h100x1", "--layout"]
    assert main([*one_device, "zero=0"]) == 3
    assert "2 nodes are enough: take more nodes or another device" in capsys.readouterr().err
    assert main(["plan", "llama-3.1-8b", "--cluster", "h100x8", "--layout", "zero=0,tp=1,pp=1,cp=1"]) == 3
    assert "fix fewer degrees" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_told_its_cheapest_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "dp=8,dp_shard=8,zero=3,micro_batch=8,recompute=none"
    assert main(["plan", "llama-3.1-8b", "--cluster", "h100x8", "--layout", layout]) == 3
    error = capsys.readouterr().err
    assert "largest: activations" in error and "cheapest fixes: layout." in error and "% time" in error


def test_a_folder_that_is_no_causal_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    assert main(["plan", str(tmp_path / "config.json"), "--cluster", "h100x8"]) == 2
    error = capsys.readouterr().err
    assert "bert" in error and error.count("\n") == 1


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; from meshwright.verbs.main import main; code = main(sys.argv[1:]);"
        "assert code == 0 and not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), code"
    )
    subprocess.run([sys.executable, "-c", code, *ONE, "--json"], check=True, stdout=subprocess.DEVNULL)


def test_what_is_recommended_leaves_memory_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest layout leaves next to no memory: it stays listed, marked as tight."""
    words = ["plan", "llama-3.1-8b", "--recipe", "global_batch=64,sequence=4096"]
    asked = requested_plan(words[1], "h100x8", None, [words[3]])
    asked = replace(asked, layout=replace(asked.layout, compile="on"))  # else a tight device has blocks compiled
    open_hand = search(build_estimator(asked), asked)
    fastest = open_hand.best[0]
    device = replace(asked.cluster.device, memory_bytes=int(fastest.peak_bytes / 0.99) + DRIVER_BYTES)
    asked = replace(asked, cluster=replace(asked.cluster, device=device))
    file, saved = tmp_path / "asked.yaml", tmp_path / "saved.yaml"
    planfile.write(asked, file)
    assert main(["plan", str(file), "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    document = predicted(["plan", str(file)], capsys)
    room = usable_bytes(asked)
    times = [layout["step_seconds"] for layout in document["layouts"]]
    assert times == sorted(times) and document["layouts"][0]["tight"], "the fastest first, as ever"
    assert document["fit_probability"] >= 0.95 > document["layouts"][0]["fit_probability"]
    assert document["peak_bytes"] < document["layouts"][0]["peak_bytes"] <= room
    roomy = [layout for layout in document["layouts"] if not layout["tight"]]
    assert document["step_seconds"] == min(layout["step_seconds"] for layout in roomy)
    assert (
        planfile.read(saved).layout == planfile.read(None, [f"layout={json.dumps(document['plan']['layout'])}"]).layout
    )
    assert " GiB !  " in printed and "it fits with a probability below 95%" in printed
    only = Ranking(best=open_hand.best[:1], legal=2)
    only.best[0] = replace(only.best[0], plan=replace(only.best[0].plan, cluster=asked.cluster))
    first, *others = recommend(build_estimator(asked), asked, only).best
    assert any(map(is_bold, others)) and not is_bold(first), "also where none of the listed leaves any"


def test_a_plan_is_saved_where_it_can_be_and_replaces_nobodys_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both errors come before the search."""
    users_file, missing = tmp_path / "plan.yaml", tmp_path / "none" / "plan.yaml"
    users_file.write_text("# mine\nmodel: gpt2\n", encoding="utf-8")
    for file, says in ((users_file, "with comments"), (missing, "there is no folder")):
        assert main([*SMALL, "--save", str(file)]) == 2
        output = capsys.readouterr()
        assert says in output.err and not output.out
    assert users_file.read_text(encoding="utf-8").startswith("# mine")
    saved = tmp_path / "saved.yaml"
    assert main([*SMALL, "--save", str(saved)]) == main([*SMALL, "--save", str(saved)]) == 0


def test_a_layout_is_taken_with_what_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                *SMALL,
                "--json",
                "--layout",
                "dp_shard=8 zero=1 micro_batch=1 (recommended, same speed with vp=8 to 9)",
            ]
        )
        == 0
    )
    assert '"dp_shard": 8' in capsys.readouterr().out
