"""Arguments of Megatron-LM: its defaults and older names, models that are no preset, what is written of experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.accuracy.published_stacks import MEGATRON_CORE
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.stacks.config_files import entries_of, file_texts
from meshwright.stacks.config_reading import ReadConfig, read
from meshwright.stacks.trainer_table import SOFTWARE
from meshwright.stacks.trainers.megatron_lm import first_dense, layout_facts, stack_of
from meshwright.verbs.plan import answer as planning

LLAMA = (
    "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --swiglu "
    "--max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)


def read_arguments(folder: Path, more: str, base: str = LLAMA) -> ReadConfig:
    path = folder / "train.sh"
    path.write_text(f"{base} {more}\n", encoding="utf-8")
    return read(str(path), "megatron-lm")


def plan_of(model: str, global_batch: int = 64, **layout: Any) -> Plan:
    degrees = {"dp_shard": 8, "zero": 1, "micro_batch": 1, **layout}
    return Plan(
        model=presets.model(model), recipe=Recipe(precision="bf16", sequence=4096, global_batch=global_batch),
        layout=Layout(**degrees), cluster=presets.cluster("h100x8", 1),
    )  # fmt: skip


def options(plan: Plan, folder: Path) -> dict[str, Any]:
    path = folder / "arguments.sh"
    path.write_text(file_texts(SOFTWARE["megatron-lm"], plan)["arguments.sh"], encoding="utf-8")
    return {entry.key: entry.value for entry in entries_of(path)}


def test_widths_that_are_not_said_are_its_defaults(tmp_path: Path) -> None:
    """megatron/training/arguments.py: of a gated MLP two thirds of 4 x hidden, in steps of 64; one query group."""
    gated, plain = (
        read_arguments(tmp_path, "").shape,
        read_arguments(tmp_path, "", LLAMA.replace("--swiglu ", "")).shape,
    )
    assert gated is not None and plain is not None
    assert (gated.ffn, plain.ffn, gated.kv_heads) == (10_880, 16_384, 32)
    grouped = read_arguments(tmp_path, "--group-query-attention").shape
    assert grouped is not None and grouped.kv_heads == 1


def test_more_learned_positions_than_a_preset_has_are_another_model(tmp_path: Path) -> None:
    base = (
        "torchrun pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--tokenizer-type GPT2BPETokenizer --micro-batch-size 1 --global-batch-size 64 --bf16"
    )
    shapes = [read_arguments(tmp_path, f"--max-position-embeddings {longest}", base).shape for longest in (1024, 2048)]
    assert [(shape.name, shape.max_positions) for shape in shapes if shape] == [("gpt2-355m", 1024), ("custom", 2048)]


def test_older_names_of_the_layout_are_read(tmp_path: Path) -> None:
    assert read_arguments(tmp_path, "--recompute-activations").facts["recompute"] == "selective"
    facts = read_arguments(tmp_path, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2").facts
    assert (facts["vp"], facts["schedule"]) == (4, "interleaved")
    with pytest.raises(PlanError, match="num-layers-per-virtual-pipeline-stage 3 does not divide"):
        read_arguments(tmp_path, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3")


def test_an_optimizer_with_other_states_is_refused(tmp_path: Path) -> None:
    assert read_arguments(tmp_path, "--optimizer adam").unknown == ()
    with pytest.raises(PlanError, match="--optimizer=sgd is not understood: take one of adam"):
        read_arguments(tmp_path, "--optimizer sgd")


@pytest.mark.parametrize(
    ("pattern", "dense"), [(None, 0), (1, 0), ("[1]*8", 0), ("([0]*3+[1]*5)", 3), ("[0]+[1]*7", 1)]
)
def test_which_layers_have_experts(pattern: object, dense: int) -> None:
    assert first_dense(pattern, 8) == dense


@pytest.mark.parametrize("pattern", [2, "[0,1]*4", "([1]*3+[0]*1)*2", "[0]*3+[1]*4"])
def test_dense_layers_elsewhere_are_refused(pattern: object) -> None:
    with pytest.raises(PlanError, match=r"moe-layer-freq .* is not counted"):
        first_dense(pattern, 8)


def test_latent_attention_of_no_preset_is_read(tmp_path: Path) -> None:
    plan = plan_of("deepseek-v3", ep=8)
    text = file_texts(SOFTWARE["megatron-lm"], plan)["arguments.sh"]
    (tmp_path / "a.sh").write_text(text, encoding="utf-8")
    assert read(str(tmp_path / "a.sh")).shape == plan.model
    fewer = text.replace("--num-layers 61", "--num-layers 6").replace("[1]*58", "[1]*3")
    (tmp_path / "b.sh").write_text(fewer, encoding="utf-8")
    shape = read(str(tmp_path / "b.sh")).shape
    assert shape is not None
    assert (shape.layers, shape.mla, shape.moe) == (6, plan.model.mla, plan.model.moe)


def test_experts_of_other_sizes_than_a_presets_are_read(tmp_path: Path) -> None:
    plan = plan_of("mixtral-8x7b", ep=8)
    text = file_texts(SOFTWARE["megatron-lm"], plan)["arguments.sh"].replace(
        "--moe-router-topk 2", "--moe-router-topk 4"
    )
    (tmp_path / "a.sh").write_text(text, encoding="utf-8")
    shape = read(str(tmp_path / "a.sh")).shape
    assert shape is not None and shape.moe is not None and shape.moe.top_k == 4


def test_experts_are_written_as_they_are_counted(tmp_path: Path) -> None:
    """Its defaults are one product per expert, tokens gathered by all, and a softmax."""
    written = options(plan_of("deepseek-v3", ep=8), tmp_path)
    assert (written["--moe-grouped-gemm"], written["--moe-token-dispatcher-type"]) == (True, "flex")
    assert written["--moe-flex-dispatcher-backend"] == "deepep"
    router = ("score-function", "num-groups", "group-topk", "topk-scaling-factor", "enable-expert-bias")
    assert [written[f"--moe-router-{name}"] for name in router] == ["sigmoid", 8, 4, 2.5, True]
    assert (written["--qk-layernorm"], written["--rotary-scaling-factor"], written["--mscale-all-dim"]) == (True, 40, 1)
    alone = options(plan_of("mixtral-8x7b"), tmp_path)
    assert alone["--moe-token-dispatcher-type"] == "alltoall" and "--moe-router-score-function" not in alone


def test_llamas_stretched_frequencies_are_written(tmp_path: Path) -> None:
    for model, factor in (("llama-3.1-8b", 8), ("llama-3.2-1b", 32)):
        written = options(plan_of(model), tmp_path)
        assert (written["--use-rope-scaling"], written["--rope-scaling-factor"]) == (True, factor)
    assert "--use-rope-scaling" not in options(plan_of("llama-2-7b"), tmp_path)


def test_gradients_in_bf16_travel_in_fp32_unless_told(tmp_path: Path) -> None:
    """megatron/training/arguments.py: --bf16 sets accumulate_allreduce_grads_in_fp32, but for --grad-reduce-in-bf16."""
    wide, narrow = (stack_of(read_arguments(tmp_path, more).facts) for more in ("", "--grad-reduce-in-bf16"))
    half = stack_of(read_arguments(tmp_path, "", LLAMA.replace("--bf16", "--fp16")).facts)
    assert [stack.gradient_exchange_bytes for stack in (wide, narrow, half)] == [4.0, 2.0, 2.0]
    assert stack_of({}).gradient_exchange_bytes == 4.0, "what is written does not tell it"


def test_how_tokens_travel_is_counted(tmp_path: Path) -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --expert-model-parallel-size 8"
    with pytest.raises(PlanError, match="moe-token-dispatcher-type allgather, the default, is not counted"):
        read_arguments(tmp_path, experts)
    facts = {
        kind: read_arguments(tmp_path, f"{experts} --moe-token-dispatcher-type {kind}").facts
        for kind in ("flex", "alltoall")
    }
    assert stack_of(facts["alltoall"]).counts_s > stack_of(facts["flex"]).counts_s == 0


@pytest.mark.parametrize(("global_batch", "rounds"), [(16, None), (20, 5), (24, None), (30, 5)])
def test_interleaved_micro_batches_leave_no_round_over(global_batch: int, rounds: int | None, tmp_path: Path) -> None:
    """megatron/core/pipeline_parallel/schedules.py: M modulo N is 0, or not below pp; N is pp unless it is said."""
    plan = plan_of("llama-3.1-8b", global_batch, dp_shard=2, pp=4, vp=2, schedule="interleaved")
    assert plan.violations() == []
    group_size = options(plan, tmp_path).get("--microbatch-group-size-per-virtual-pipeline-stage")
    assert group_size == rounds
    times, size = global_batch // 2, group_size or 4
    assert 4 <= size <= times and not 0 < times % size < 4


@pytest.mark.parametrize("model", ["gemma-2-9b", "olmo-2-7b", "nemotron-4-15b", "gpt-oss-20b"])
@pytest.mark.parametrize("word", ["megatron-lm", "nanotron"])
def test_models_with_parts_that_are_not_written_are_refused(word: str, model: str) -> None:
    with pytest.raises(PlanError, match=word):
        file_texts(SOFTWARE[word], plan_of(model))


def test_a_shared_expert_of_another_width_is_refused(tmp_path: Path) -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size"
    shape = read_arguments(tmp_path, f"{experts} 2048").shape
    assert shape is not None and shape.moe is not None and shape.moe.shared_experts == 2
    assert replace(shape.moe, shared_experts=0).ffn == 1024
    with pytest.raises(PlanError, match="1500 is no multiple of an expert's 1024"):
        read_arguments(tmp_path, f"{experts} 1500")


@pytest.mark.parametrize(
    ("times", "ranks", "taken"), [(8, 4, None), (10, 4, 5), (11, 4, 6), (5, 4, 5), (7, 4, 7), (13, 8, 13)]
)
def test_rounds_of_interleaved_stages_are_those_that_megatron_core_takes(
    times: int, ranks: int, taken: int | None
) -> None:
    """Its own conditions (schedules.py): pp <= round <= M, and what is left over is nothing or as many as ranks."""
    plan = Plan(
        model=presets.model("llama-3.1-8b"), recipe=Recipe(sequence=4096, global_batch=times),
        layout=Layout(pp=ranks, vp=2, schedule="interleaved", micro_batch=1), cluster=presets.cluster(f"h100x{ranks}"),
    )  # fmt: skip
    group_size = layout_facts(plan)["round"]
    assert group_size == taken
    size = group_size or ranks
    assert ranks <= size <= times and not 0 < times % size < ranks


@pytest.mark.parametrize("word", ["megatron-lm", "nemo"])
def test_no_rank_interleaves_fewer_micro_batches_than_there_are_ranks(word: str) -> None:
    layout = {"pp": 4, "vp": 2, "schedule": "interleaved", "micro_batch": 2}
    with pytest.raises(IllegalLayout, match=r"rounds of pp=4 micro-batches or more: a rank has 2"):
        planning.plan("llama-3.1-8b", cluster="h100x4", stack=word, layout=layout, recipe="global_batch=4")
    fits = planning.plan("llama-3.1-8b", cluster="h100x4", stack=word, layout=layout, recipe="global_batch=8")
    assert fits.best.plan.layout.vp == 2


def test_exchanges_run_beside_products_with_sequence_parallelism_only() -> None:
    plan = Plan(
        model=presets.model("llama-3.1-8b"), recipe=Recipe(sequence=4096, global_batch=8),
        layout=Layout(tp=8), cluster=presets.cluster("h100x8"),
    )  # fmt: skip

    def exposed_s(sp: bool, hidden: float) -> float:
        stack = replace(MEGATRON_CORE, hides_tensor=hidden)
        return predict(replace(plan, layout=replace(plan.layout, sp=sp)), stack).time.total_s

    assert exposed_s(False, 0.7) == exposed_s(False, 0.0)
    assert exposed_s(True, 0.7) < exposed_s(True, 0.0)


def test_dropout_is_on_unless_a_file_says_zero_and_its_masks_are_kept(tmp_path: Path) -> None:
    """megatron/core/transformer/transformer_config.py: hidden_dropout and attention_dropout are 0.1."""
    plain, off = read_arguments(tmp_path, ""), read_arguments(tmp_path, "--hidden-dropout 0.0 --attention-dropout 0.0")
    assert stack_of(plain.facts).dropout and not stack_of(off.facts).dropout
    assert any(sentence.startswith("--attention-dropout=0.1 draws masks") for sentence in plain.uncounted)
    assert not any("dropout" in sentence for sentence in off.uncounted)


def test_a_loss_that_is_not_fused_is_named(tmp_path: Path) -> None:
    assert any(
        sentence.startswith("--cross-entropy-loss-fusion=false") for sentence in read_arguments(tmp_path, "").uncounted
    )
    fused = read_arguments(tmp_path, "--cross-entropy-loss-fusion --hidden-dropout 0 --attention-dropout 0.0")
    assert fused.uncounted == () and "--cross-entropy-loss-fusion" not in fused.ignored


def test_what_is_written_leaves_nothing_uncounted(tmp_path: Path) -> None:
    plan = plan_of("llama-3.1-8b")
    for name, text in file_texts(SOFTWARE["megatron-lm"], plan).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read(str(tmp_path), "megatron-lm").uncounted == ()
