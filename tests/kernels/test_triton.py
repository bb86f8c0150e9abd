"""Every Triton kernel in the interpreter, file by file in processes of their own, and compiled for GPUs that are not
here: shared memory within limits, no register spilled, tensor cores where products are."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from packaging.version import Version

from meshwright.kernels import chooser

triton = pytest.importorskip("triton")

from tests.kernels.cross_compiled import SHARED_LIMIT, Sample, compiled  # noqa: E402  # they import triton
from tests.kernels.kernel_samples import SAMPLES  # noqa: E402

NUMPY_SAYS = "ignore:Conversion of an array"
"""Of what Triton 3.6 does with its numbers."""
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "interpreted").glob("*.py")))
@pytest.mark.long
def test_in_the_interpreter(file: str) -> None:
    if file == "poison.py":
        return
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("this Triton's interpreter is older than this numpy")
    path = str(HERE / "interpreted" / file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", NUMPY_SAYS, path]
    finished = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout and "failed" not in finished.stdout


def test_every_operation_with_a_rule_is_chosen_by_reason() -> None:
    import torch

    for operation in chooser.RULES:
        found = chooser.choice(operation, torch.device("cpu"), torch.float32)
        assert found.by == "torch" and found.reason == "a CPU"


def test_an_installed_package_is_no_driver() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert chooser.unavailable(torch.device("cuda", 0)) == "no CUDA device"
    assert "driver" in chooser._without_driver()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [90, *(pytest.param(one, marks=pytest.mark.slow) for one in (80, 100))])
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.long
def test_compiled_for_gpus_that_are_not_here(sample: Sample, capability: int) -> None:
    found = compiled(sample, capability)
    assert found.shared <= SHARED_LIMIT[capability]
    assert found.spilled == 0, f"{found.registers} registers and {found.spilled} bytes of others in memory"
    if sample.products:
        assert found.has_tensor_cores(capability, sample.whole)
