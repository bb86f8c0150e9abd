"""What a decode step of an 8B model launches on a GPU, held at its numbers: more is slower, fewer is news."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.decode_step import counted_step, fake_gpu, limit_s, predicted_s
from meshwright.kernels import chooser
from meshwright.spec import presets

ROOT = Path(__file__).parents[2]
SHAPE = presets.model("llama-3.1-8b")
EACH_LAYER = {"root_norm_forward": 2, "keep_rows": 1, "paged_rows": 1, "add_splits": 0, "swiglu_forward": 1}
"""Beside products."""
ONCE = {"embedding": 1, "cos": 1, "sin": 1, "root_norm_forward": 1, "add": 1, "mm": 1}
"""Of a step; the product is the head's."""
PRODUCTS: dict[str, dict[int, dict[str, int]]] = {
    "bf16": {1: {"mm": 4}, 64: {"mm": 4}},
    "int4-rtn": {1: {"few_packed_rows": 4}, 64: {"packed_rows": 4, "sum_parts": 3}},
    "nf4": {1: {"few_packed_rows": 4}, 64: {"packed_rows": 4, "sum_parts": 3}},
    "int8": {1: {"round_rows": 4, "few_int8_rows": 4}, 64: {"round_rows": 4, "int8_rows": 4, "finish_parts": 3}},
    "fp8": {1: {"round_rows": 4, "few_packed_rows": 4}, 64: {"round_rows": 4, "_scaled_mm": 4}},
}
"""Of a layer, by rows: queries, keys and values; the output; gate and up; down. K is cut for those of few columns."""
READ_GB = {"bf16": 15.04, "int4-rtn": 5.117, "nf4": 5.008, "int8": 8.065, "fp8": 8.069}
HOST = {
    "bf16": (1878, 4499), "int4-rtn": (2902, 6675), "nf4": (2902, 6675), "int8": (3414, 7187), "fp8": (3414, 7571),
}  # fmt: skip
"""Operations and calls."""


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("batch", [1, 64])
def test_launches_and_bytes(form: str, batch: int) -> None:
    """Each weight is read once; beside them little is read and written."""
    counts = counted_step(SHAPE, form, batch, 160)
    launched = counts.by_name
    for name, count in {**EACH_LAYER, **PRODUCTS[form][batch]}.items():
        assert launched[name] == SHAPE.layers * count + ONCE.get(name, 0), name
    assert not counts.waits, "a graph cannot hold what waits for the host"
    others = sum(launched.values()) - sum(launched[name] for name in {*EACH_LAYER, *PRODUCTS[form][batch], *ONCE})
    assert others <= 5, launched
    if batch == 1:
        assert counts.read_bytes / 1e9 == pytest.approx(READ_GB[form], abs=0.006)
        assert counts.written_bytes < 25e6
    device = presets.device("h200-sxm")
    predicted = predicted_s(counts, SHAPE, form, batch, 160, device)
    assert limit_s(SHAPE, form, device) < predicted < 2.5 * limit_s(SHAPE, form, device) + batch * 3e-5


def test_what_the_host_does() -> None:
    """Operations of torch and Triton, and calls of Python, where a step is no graph.

    In a process of its own: what other tests leave in caches moved one count by 16 calls.
    """
    program = (
        "import json\nfrom benchmarks.decode_step import counted_step\n"
        "from tests.benchmarks.test_decode_step import HOST, SHAPE\n"
        "counts = {form: counted_step(SHAPE, form, 1, 160) for form in HOST}\n"
        "print(json.dumps({form: [count.dispatches, count.calls] for form, count in counts.items()}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {form: list(counts) for form, counts in HOST.items()}


def test_runs_of_keys_are_added_up_behind_the_first() -> None:
    """A sequence of more than 256 positions has several; that is one launch more for each layer."""
    short, long = (counted_step(SHAPE, "bf16", 1, context) for context in (256, 257))
    assert len(long.launches) - len(short.launches) == long.by_name["add_splits"] == SHAPE.layers


def test_the_fake_gpu_is_gone_afterwards() -> None:
    import torch
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, chooser._choose, torch.cuda.get_device_properties
    with fake_gpu(counted_step(presets.model("llama-tiny"), "bf16", 2, 40), 40):
        assert JITFunction.run is not before[0]
    assert (JITFunction.run, chooser._choose, torch.cuda.get_device_properties) == before
