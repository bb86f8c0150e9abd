"""The three columns: what agrees, what does not and why, what is not known, and that nothing is invented."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import planfile
from meshwright.observe.compare.comparison import Column, Comparison, columns, compare, planned_column
from meshwright.observe.compare.finished_run import open_run
from meshwright.observe.compare.table import as_json, explanation
from meshwright.observe.dryrun.document import dry_run_document
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.shared_document import TimePart, parse_document
from meshwright.spec import Cluster, Layout, presets
from meshwright.spec.errors import RunError
from meshwright.verbs.compare.screen import answer
from tests.observe.folders import ALONE, PLAN, dry_run_json, ledger_json, profile_json, write_run


def compare_folder(folder: Path, tolerance: float = 0.1) -> Comparison:
    run = open_run(folder)
    return compare(run.plan_as_run, columns(run), tolerance)


def row(comparison: Comparison, section: str, what: str, unit: str = "", rank: int | None = None) -> Any:
    [match] = [
        row
        for row in comparison.rows
        if (row.section, row.what) == (section, what) and unit in ("", row.unit) and rank in (None, row.rank)
    ]
    return match


def test_equal_columns_agree_in_every_row(tmp_path: Path) -> None:
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=profile_json(PLAN)))
    assert comparison.disagreeing == ()
    kinds = {line.what for line in comparison.rows if line.section == "memory"}
    assert {"peak", "parameters", "gradients", "moments", "activations", "logits", "reserve"} <= kinds
    for unit in ("bytes", "calls"):
        sent = row(comparison, "traffic", "pp send", unit, rank=2)
        assert len(set(sent.values)) == 1 and sent.values[0] > 0 and sent.tolerance == 0
    planned, dry, measured = row(comparison, "time", "compute").values
    assert planned == measured > 0 and dry is None
    assert row(comparison, "use", "bubble").values[0] == row(comparison, "use", "bubble").values[2] > 0


def test_a_finished_run_is_compared_without_another(tmp_path: Path) -> None:
    comparison = compare_folder(write_run(tmp_path / "run"), 1e9)
    assert row(comparison, "memory", "peak", rank=2).values[2] == ledger_json(PLAN)["ranks"][1]["peak_bytes"]
    assert row(comparison, "memory", "moments", rank=0).error(0) == 0
    activations = row(comparison, "memory", "activations", rank=0)
    assert activations.values[1:] == (None, None)
    assert "there is no dryrun.json" in activations.missing[1] and "meshwright profile" in activations.missing[2]
    gradients = row(comparison, "memory", "gradients", rank=0)
    assert not gradients.known_twice and "update" in gradients.note and gradients.error(0) is None
    step = row(comparison, "time", "step")
    assert step.values[2] == pytest.approx(0.2)  # the first step, with its second of start, is not counted
    assert "meshwright profile" in row(comparison, "use", "bubble").missing[2]
    assert row(comparison, "use", "MFU (causal)").values[2] == 0.4


def test_an_unknown_device_has_no_times_and_says_so(tmp_path: Path) -> None:
    plan = replace(PLAN, cluster=Cluster(devices_per_node=4))
    stored = ledger_json(plan) | {"environment": {"device": "NVIDIA T1000"}}
    comparison = compare_folder(write_run(tmp_path / "run", plan, ledger=stored))
    assert all(line.values[0] is None for line in comparison.rows if line.section in ("time", "use"))
    assert "is not described: name a cluster" in row(comparison, "time", "step").missing[0]
    assert row(comparison, "memory", "parameters", rank=0).values[0] > 0


def test_a_run_that_kept_no_device_is_planned_for_the_gpu_that_its_ledger_names(tmp_path: Path) -> None:
    """As runs were kept whose plan named no cluster. A chip that there is in two sizes is not guessed."""
    plan = replace(PLAN, cluster=Cluster())
    stored = ledger_json(plan) | {"environment": {"device": "NVIDIA H200"}}
    folder = write_run(tmp_path / "run", plan, ledger=stored)
    comparison = compare_folder(folder)
    assert open_run(folder).plan.cluster == presets.cluster("h200x4")
    step, named = (
        row(comparison, "time", "step"),
        compare_folder(write_run(tmp_path / "named", replace(plan, cluster=presets.cluster("h200x4")))),
    )
    assert step.values[0] == row(named, "time", "step").values[0] > 0 and not step.missing[0]
    unsure = ledger_json(plan) | {"environment": {"device": "NVIDIA GH200"}}
    assert row(compare_folder(write_run(tmp_path / "unsure", plan, ledger=unsure)), "time", "step").values[0] is None


def test_a_plan_for_another_device_is_compared_by_its_program(tmp_path: Path) -> None:
    here = replace(ALONE, cluster=Cluster())
    files: dict[str, Any] = {
        name: make(here) | {"device": "cpu"} for name, make in (("ledger", ledger_json), ("dryrun", dry_run_json))
    }
    assert presets.device("h100").is_gpu and not here.cluster.device.is_gpu
    comparison = compare_folder(write_run(tmp_path / "run", replace(ALONE, cluster=presets.cluster("h100x1")), **files))
    on_cpu = compare_folder(write_run(tmp_path / "own", here, **files))
    assert [line.values for line in comparison.rows] == [
        line.values for line in on_cpu.rows
    ] and comparison.disagreeing == ()
    assert "is for H100-SXM-80, and the run was on a CPU" in row(comparison, "time", "step").missing[0]
    told = "\n".join(answer(comparison, "run")).replace("\n", " ")
    assert told.index("AGREES") < told.index("The plan is for H100-SXM-80") and "no time" in told
    assert "another" not in "\n".join(answer(on_cpu, "own")) and not on_cpu.columns[0].elsewhere


def test_traffic_that_is_one_call_off_disagrees_and_is_explained(tmp_path: Path) -> None:
    document = profile_json(PLAN)
    sent = next(entry for entry in document["ranks"][1]["traffic"] if entry["axis"] == "tp")
    sent["calls"] += 1
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=document), tolerance=0.5)
    [bad] = comparison.disagreeing
    assert (bad.what, bad.unit, bad.rank, bad.beyond) == ("tp all_reduce", "calls", 2, (0, 1))
    first = explanation(comparison, bad)
    assert first[0].endswith("1 more than planned.") and first[1].startswith("Its bytes: planned")


def test_memory_that_is_off_is_explained_by_module(tmp_path: Path) -> None:
    document = profile_json(PLAN)
    rank = document["ranks"][0]
    held = next(held_bytes for held_bytes in rank["memory"] if held_bytes["kind"] == "activations")
    held["bytes"] += 40_000
    rank["peak_bytes"] += 40_000
    rank["activations"][0]["bytes"] = 44_000
    dry = dry_run_json(PLAN)
    dry["ranks"][0]["activations"].append({"where": "norm mul", "bytes": 40_000})
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=dry, profile=document), tolerance=0.001)
    peak, activations = comparison.disagreeing
    assert (peak.what, activations.what) == ("peak", "activations")
    words = " ".join(explanation(comparison, peak))
    assert "Of it activations: 39.1 KiB more" in words and "layers.*.mlp mm 3.9 KiB and 43.0 KiB" in words
    assert "as large as norm mul" in words and "step 2, backward of stage 0, micro-batch 1" in words


def test_small_parts_are_held_against_the_whole(tmp_path: Path) -> None:
    document = profile_json(PLAN)
    for rank in document["ranks"]:
        next(held for held in rank["memory"] if held["kind"] == "counters")["bytes"] *= 3
    folder = write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=document)
    counters = row(compare_folder(folder), "memory", "counters", rank=0)
    assert counters.agrees() and counters.error(0) == pytest.approx(-2 / 3)
    assert not row(compare_folder(folder, 0.0), "memory", "counters", rank=0).agrees()


def test_a_toy_differs_by_less_than_a_segment_of_the_allocator(tmp_path: Path) -> None:
    document = profile_json(PLAN)
    for rank in document["ranks"]:
        next(part for part in rank["memory"] if part["kind"] == "activations")["bytes"] += 3 * 2**19
        rank["peak_bytes"] += 3 * 2**19
    toy = compare_folder(write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=document))
    assert not toy.disagreeing and row(toy, "memory", "activations", rank=0).small
    for rank in document["ranks"]:
        rank["peak_bytes"] += 2**20
    assert {
        part.what
        for part in compare_folder(
            write_run(tmp_path / "more", dryrun=dry_run_json(PLAN), profile=document)
        ).disagreeing
    } == {"peak"}


def test_documents_of_another_plan_are_left_aside(tmp_path: Path) -> None:
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=dry_run_json(ALONE), profile=profile_json(ALONE)))
    assert comparison.columns[1].document is None and "of another plan" in comparison.columns[1].about
    assert "and not used" in comparison.columns[2].about
    assert row(comparison, "memory", "activations", rank=0).values[2] is None


def test_a_dry_run_is_asked_for_where_none_is_kept(tmp_path: Path) -> None:
    from meshwright.observe.shared_document import parse_document

    asked = []
    run = open_run(write_run(tmp_path / "run"))

    def dryer(plan: Any, device: str) -> Any:
        asked.append((plan.layout.pp, device))
        return parse_document(dry_run_json(plan), "")

    comparison = compare(run.plan_as_run, columns(run, dryer=dryer))
    assert asked == [(2, "cuda")] and row(comparison, "memory", "activations", rank=0).values[1] > 0


def test_the_batch_of_the_last_step_is_the_one_compared(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text().replace('"global_batch": 4', '"global_batch": 2')
    (folder / "metrics.jsonl").write_text(text)
    assert open_run(folder).plan_as_run.recipe.global_batch == 2
    assert row(compare_folder(folder), "traffic", "pp send", "calls", rank=0).values == (2, None, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ledger", "{", "no JSON"), ("ledger", "[]", "no JSON object"), ("ledger", '{"source": "predicted"}', "source"),
        ("dryrun", '{"source": "measured"}', "where 'dryrun' belongs"),
        ("profile", '{"source": "measured", "ranks": [{"rank": -1}]}', "ranks.0.rank"),
        ("profile", '{"source": "measured", "step_seconds": NaN}', "no JSON"),
        ("ledger", '{"source": "measured", "rank": 0, "memory": [], "traffic": [], "peaks": ["x"]}', "peaks"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = write_run(tmp_path / "run", **{name: text})
    with pytest.raises(RunError) as caught:
        compare_folder(folder)
    assert f"{name}.json" in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


def test_foreign_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no step of a run yet"):
        open_run(write_run(tmp_path / "empty", steps=0))
    with pytest.raises(RunError, match="does not exist"):
        open_run(tmp_path / "nowhere")
    folder = write_run(tmp_path / "foreign")
    (folder / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
    with pytest.raises(RunError, match="of another program: the record of step 1 has no number loss"):
        open_run(folder)
    (folder / "plan.yaml").write_text("name: ci\non: push\n")
    with pytest.raises(RunError, match="damaged or of another program"):
        open_run(folder)


def test_a_ledger_of_one_rank_is_still_read(tmp_path: Path) -> None:
    old = {
        key: value
        for key, value in ledger_json(ALONE).items()
        if key in ("source", "rank", "step", "memory", "traffic")
    }
    comparison = compare_folder(write_run(tmp_path / "run", ALONE, ledger=old))
    assert row(comparison, "memory", "moments").error(0) == 0 and row(comparison, "memory", "peak").values[2] is None


def test_json_and_lines_say_the_same(tmp_path: Path) -> None:
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=dry_run_json(PLAN)))
    document = json.loads(json.dumps(as_json(comparison, "run"), allow_nan=False))
    assert document["rank"] == comparison.rank and len(document["rows"]) == len(comparison.rows)
    assert document["agrees"] == (not comparison.disagreeing) and document["columns"]["dryrun"]["there"]
    printed = "\n".join(answer(comparison, "run", every=True))
    for entry in document["rows"]:
        if entry["rank"] in (None, comparison.rank):
            assert entry["what"] in printed
    missing = [entry for entry in document["rows"] if entry["measured"] is None]
    assert missing and all(entry["missing"]["measured"] for entry in missing)


def off(document: dict[str, Any], kind: str, times: float) -> dict[str, Any]:
    """The same with so much more of a kind on every rank."""
    for rank in document["ranks"]:
        for held in rank["memory"]:
            held["bytes"] = round(held["bytes"] * times) if held["kind"] == kind else held["bytes"]
    return document


def test_gradients_are_judged_where_nothing_was_measured(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", dryrun=off(dry_run_json(PLAN), "gradients", 30))
    (folder / "ledger.json").unlink()
    assert "gradients" in {line.what for line in compare_folder(folder).disagreeing}


def test_gradients_of_plan_and_dry_run_are_judged_beside_those_of_the_update(tmp_path: Path) -> None:
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=off(dry_run_json(PLAN), "gradients", 30)))
    bad = row(comparison, "memory", "gradients", rank=0)
    assert (bad.reference, bad.beyond, bad.aside) == (1, (0,), (2,)) and "update" in bad.note


@pytest.mark.parametrize("zero", [1, 2])
def test_whole_copies_are_gone_at_the_update(zero: int, tmp_path: Path) -> None:
    """A run measures its memory there: of ZeRO-1 and ZeRO-2 it holds shards alone."""
    sharded = replace(PLAN, layout=Layout(dp_shard=4, zero=zero, micro_batch=1))
    document = ledger_json(sharded)
    for owner in (document, *document["ranks"]):
        sizes = {held["kind"]: held["bytes"] for held in owner["memory"]}
        assert sizes["parameters"] > sizes["shards"] > 0
        remaining = sizes | {"parameters": sizes["shards"]}
        owner["memory"] = [{"kind": kind, "bytes": size} for kind, size in remaining.items() if kind != "shards"]
    comparison = compare_folder(write_run(tmp_path / "run", sharded, ledger=document, dryrun=dry_run_json(sharded)))
    assert not [line.what for line in comparison.disagreeing if line.section == "memory"]
    copies = row(comparison, "memory", "parameters", rank=0)
    assert copies.aside and "measured at the optimizer's update" in copies.note


def test_only_bytes_to_experts_may_differ(tmp_path: Path) -> None:
    experts = replace(
        PLAN, layout=Layout(dp_shard=4, ep=2, zero=1, micro_batch=1),
        model=replace(presets.model("mixtral-8x7b"), layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=1024),
    )  # fmt: skip
    document = profile_json(experts)
    for sent in document["ranks"][0]["traffic"]:
        sent["bytes"] += 1 + sent["bytes"] // 20
    comparison = compare_folder(
        write_run(tmp_path / "run", experts, ledger=None, dryrun=dry_run_json(experts), profile=document)
    )
    bad = {line.what for line in comparison.disagreeing if line.section == "traffic"}
    sent = {line.what for line in comparison.rows if line.section == "traffic" and any(line.values)}
    assert "ep all_to_all" in sent and bad == sent - {"ep all_to_all"}
    next(s for s in document["ranks"][0]["traffic"] if s["axis"] == "ep" and s["collective"] == "all_to_all")[
        "calls"
    ] += 1
    comparison = compare_folder(write_run(tmp_path / "more", experts, dryrun=dry_run_json(experts), profile=document))
    assert ("ep all_to_all", "calls") in {(line.what, line.unit) for line in comparison.disagreeing}


def test_kinds_are_judged_at_like_moments_only(tmp_path: Path) -> None:
    """The dry run's peak stands at the head, the others' inside a layer: its total counts, what it is made of not."""
    dry = dry_run_json(PLAN)
    first = dry["ranks"][0]
    inside = sum(held["bytes"] for held in first["memory"] if held["kind"] in ("activations", "temporaries"))
    first["memory"] = [held for held in first["memory"] if held["kind"] not in ("activations", "temporaries", "logits")]
    first["memory"].append({"kind": "logits", "bytes": inside})
    first["when"] = "step 2, F 0 1"
    comparison = compare_folder(write_run(tmp_path / "run", dryrun=dry, profile=profile_json(PLAN)))
    assert comparison.disagreeing == ()
    logits = row(comparison, "memory", "logits", rank=0)
    assert logits.aside == (1,) and logits.error(1) is None and "dry run at head and loss" in logits.note
    assert row(comparison, "memory", "moments", rank=0).aside == ()
    told = " ".join(" ".join(answer(comparison, "run")).split())
    assert "sampled at different moments, not comparable: " in told and "peak of rank 0 at: planned" in told
    json.dumps(as_json(comparison, "run"), allow_nan=False)


def test_training_beside_a_profile_is_judged_too(tmp_path: Path) -> None:
    document = ledger_json(PLAN)
    document["ranks"][0]["peak_bytes"] *= 2
    document["ranks"][0]["traffic"][0]["calls"] += 7
    comparison = compare_folder(
        write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=profile_json(PLAN), ledger=json.dumps(document))
    )
    bad = [(line.what, line.unit, line.rank) for line in comparison.disagreeing]
    assert ("peak, in training", "bytes", 0) in bad
    [traffic] = [what for what, unit, rank in bad if (unit, rank) == ("calls", 0)]
    assert traffic.endswith(", in training")
    assert explanation(comparison, comparison.disagreeing[-1])


def test_nothing_known_twice_is_no_agreement(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", replace(PLAN, cluster=Cluster(devices_per_node=4)))
    (folder / "ledger.json").unlink()
    comparison = compare_folder(folder)
    assert comparison.judged == () and as_json(comparison, "run")["agrees"] is None


def test_impossible_figures_are_no_profile(tmp_path: Path) -> None:
    for key, value in (("step_seconds", -1), ("peak_bytes", -5), ("mfu_full", -0.1)):
        folder = write_run(tmp_path / key, profile={**profile_json(PLAN), key: value})
        with pytest.raises(RunError, match=key):
            open_run(folder)


def test_waiting_for_host_memory_is_computing_to_a_clock(tmp_path: Path) -> None:
    """The planner says it apart; a profile cannot."""
    run = open_run(write_run(tmp_path / "run", dryrun=dry_run_json(PLAN), profile=profile_json(PLAN)))
    planned, *others = columns(run)
    assert planned.document is not None
    plain = row(compare(run.plan_as_run, (planned, *others), 0.1), "time", "compute").values[0]
    time = (*(part for part in planned.document.time if part.what != "offload"), TimePart(what="offload", seconds=2.0))
    waiting = replace(planned, document=replace(planned.document, time=time))
    comparison = compare(run.plan_as_run, (waiting, *others), 0.1)
    assert row(comparison, "time", "compute").values[0] == pytest.approx(plain + 2.0)
    assert "offload" not in {line.what for line in comparison.rows}


README = Path(__file__).parents[2] / "README.md"
NOT_MEASURED = Column(title="measured", document=None, about="nothing was trained")


def beside_a_dry_run(*words: str, processes: int = 1) -> Comparison:
    """Plan and dry run on a CPU, of the default plan with these words."""
    plan = planfile.read(None, ["model=llama-tiny", *words], processes=processes)
    seen = parse_document(
        json.loads(json.dumps(dry_run_document(dry_run(plan, device="cpu", processes=1)))), "the dry run"
    )
    return compare(plan, (planned_column(plan), Column(title="dry run", document=seen, about=""), NOT_MEASURED))


def test_plan_and_dry_run_of_the_readmes_run_on_two_processes_agree() -> None:
    [line] = [line for line in README.read_text(encoding="utf-8").splitlines() if "torchrun --nproc_per_node 2" in line]
    layout = beside_a_dry_run(*line.partition("plan.yaml ")[2].split(), processes=2)
    assert layout.disagreeing == () and len(layout.judged) > 15
