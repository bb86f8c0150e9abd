"""Properties: any plan survives the file, and no key or value ends in anything but a plan or one line."""

import string
import tempfile
from functools import partial
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planfile import absolute, dump, read, write
from meshwright.planfile.keys import ALIASES, NOT_A_KEY, canonical_key, sections
from meshwright.spec import BatchStage, Cluster, Data, Device, Layout, MLAShape, ModelShape, MoEShape, Plan, Recipe
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import RopeScaling

# Characters that YAML may not hold (controls, surrogates) cannot come from a terminal or a file either.
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn")), min_size=1, max_size=30)
NUMBERS = st.floats(0, 1e30, allow_nan=False, allow_infinity=False)
SHARES = st.floats(0, 1, exclude_max=True)

SHAPE = partial(
    st.builds,
    ModelShape,
    name=WORDS,
    vocab=st.integers(1, 10**6),
    layers=st.integers(1, 200),
    hidden=st.just(64),
    heads=st.sampled_from([2, 4, 8]),
    ffn=st.integers(1, 10**5),
    max_positions=st.integers(1, 10**6),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    norm_eps=st.floats(1e-12, 1),
    rope_theta=st.floats(1, 1e9),
    qkv_bias=st.booleans(),
    tied=st.booleans(),
    rope_scaling=st.none()
    | st.builds(RopeScaling, kind=st.just("yarn"), factor=st.floats(1, 64), original_positions=st.just(9)),
    moe=st.none() | st.builds(MoEShape, experts=st.integers(4, 64), top_k=st.integers(1, 4), ffn=st.integers(1, 999)),
)
LATENT = st.builds(
    MLAShape, **{key: st.sampled_from([2, 4, 64]) for key in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")}
)
SHAPES = SHAPE(kv_heads=st.sampled_from([0, 1, 2])) | SHAPE(mla=LATENT)
RECIPES = st.builds(
    Recipe,
    steps=st.integers(1, 2**31 - 1),
    learning_rate=NUMBERS,
    epsilon=st.floats(1e-300, 1),
    clip=NUMBERS,
    dropout=SHARES,
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    seed=st.integers(0, 2**63 - 1),
    document_mask=st.booleans(),
    batch_ramp=st.lists(st.integers(0, 10**12), unique=True, max_size=4).map(
        lambda tokens: tuple(BatchStage(tokens=seen, global_batch=1 + i) for i, seen in enumerate(sorted(tokens)))
    ),
)
PLANS = st.builds(
    Plan,
    model=SHAPES,
    data=st.builds(Data, path=WORDS, tokenizer=WORDS, validation=SHARES, limit_bytes=st.integers(0, 10**15)),
    run=WORDS,
    init=st.just("random") | WORDS,
    recipe=RECIPES,
    layout=st.builds(
        Layout,
        tp=st.integers(1, 64),
        zero=st.integers(0, 3),
        sp=st.booleans(),
        micro_batch=st.integers(0, 9),
        stages=st.lists(st.integers(1, 99), max_size=4).map(tuple),
    ),
    cluster=st.builds(
        Cluster,
        device=st.builds(Device, name=WORDS, memory_bytes=st.integers(0, 2**45), bf16_flop_per_s=NUMBERS, source=WORDS),
        devices_per_node=st.integers(1, 99),
    ),
)


@settings(max_examples=40, deadline=None)
@given(PLANS)
def test_a_plan_written_is_the_plan_read(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        write(plan, path)
        again = read(path)
        assert absolute(again) == absolute(plan)
        assert dump(absolute(again)) == dump(absolute(plan))
        assert [entry.name for entry in Path(folder).iterdir()] == ["plan.yaml"]


KEYS = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=30)
SECTIONS = [section for section in sections() if section != "recipe.batch_ramp"]


@settings(deadline=None)
@given(st.sampled_from(SECTIONS), KEYS)
def test_unknown_keys_are_answered_with_a_name(section: str, key: str) -> None:
    if canonical_key(section, key) in sections()[section]:
        return
    try:
        read(None, [f"{section}.{key}=1".lstrip(".")])
    except PlanError as error:
        line = str(error)
        assert f"{key} is not known: " in line and "\n" not in line
        explained = key.replace("-", "_").lower() in NOT_A_KEY
        known = {f"{part}.{name}".lstrip(".") for part, keys in sections().items() for name in keys}
        none = line.split(" (and")[0].endswith("no key is like it; `meshwright init` prints them")
        assert explained or none or line.split(" (and")[0].rstrip("?").split()[-1] in known
    else:
        raise AssertionError(f"{section}.{key} was read")


@settings(deadline=None)
@given(st.sampled_from([(s, k) for s in SECTIONS for k in sections()[s]]), st.text(max_size=40))
def test_any_value_is_read_or_refused_in_one_line(key: tuple[str, str], value: str) -> None:
    try:
        read(None, [f"{'.'.join(filter(None, key))}={value}"])
    except PlanError as error:
        assert str(error).isprintable()


@settings(deadline=None, max_examples=200)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | st.text("{}[]:,-&*!|>'\"%@`# \n\tab01", max_size=60).map(str.encode)
)
def test_any_file_is_read_or_refused_in_one_line(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_bytes(data)
        try:
            read(path)
        except PlanError as error:
            assert "\n" not in str(error)


def test_aliases_lead_to_keys_and_hide_none() -> None:
    for section, names in ALIASES.items():
        for alias, name in names.items():
            assert name in sections()[section], (section, alias)
            assert alias not in sections()[section], (section, alias)
            assert alias not in NOT_A_KEY
