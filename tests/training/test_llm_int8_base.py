"""Adapters beside LLM.int8(): rounded rows and columns of outliers forward, restored weights backward."""

from pathlib import Path

import pytest
import torch

from meshwright.kernels import reference
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import quantized_linears
from meshwright.model.quantized_weights import frozen_codes
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.step.predict import predict
from meshwright.spec.errors import HubError, IllegalLayout
from meshwright.spec.memory.held import memory
from meshwright.spec.model.quantization_schemes import find_scheme
from meshwright.store.model_weights import open_base
from meshwright.training.optimizer.optimizer import held_bytes
from tests.training.test_adapters import peft_run
from tests.training.test_frozen_codes import LORA, files, losses, state_of
from tests.training.test_quantized_base import beside, quantized
from tests.training.test_tuning import plan

__all__ = ["files"]
BASE = "model.lora.base=llm-int8"


@pytest.mark.parametrize("large", [1.0, 40.0])
def test_a_product_and_its_gradient_are_those_of_the_twin(large: float) -> None:
    """With columns above the threshold and without: sums of whole numbers are exact, the rest is rounding."""
    draw = torch.Generator().manual_seed(3)
    scheme = find_scheme("llm-int8")
    assert scheme is not None
    matrix = quantize_matrix("w", torch.randn(48, 64, generator=draw), scheme)
    matrix.keeps_copies = False
    x = torch.randn(5, 64, generator=draw)
    x[:, 7] *= large
    x.requires_grad_()
    [product] = quantized_linears(x, [matrix], [None])
    twin = x.detach().requires_grad_()
    [right] = reference().quantized_linears(twin, [matrix], [None])
    torch.testing.assert_close(product, right, rtol=1e-5, atol=1e-5)
    plain = x.detach() @ matrix.dequantized().t()
    assert float((product - plain).detach().abs().max()) > 1e-3, "rows are rounded"
    gradient = torch.randn(5, 48, generator=draw)
    product.backward(gradient)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, gradient @ matrix.dequantized(), rtol=1e-5, atol=1e-5)
    [through] = torch.autograd.grad(right, twin, gradient)  # rounding has no gradient: the twin's is said, too
    torch.testing.assert_close(through, x.grad, rtol=1e-5, atol=1e-5)
    assert not matrix.prepared, "nothing is kept beside the codes"


def test_drawn_codes_train_an_adapter_and_are_counted(files: Path) -> None:
    asked = plan(files, *LORA, BASE, "recipe.steps=6", "layout.compile=off")
    state = state_of(asked)
    assert len(frozen_codes([state.engine.model], asked.model)) == 14
    counted = memory(asked.model, asked.layout, "fp32")["step"]
    assert held_bytes(state.engine, state.optimizer) == {k: v for k, v in counted.items() if k != "gradients"}
    curve = losses(asked)
    same = losses(plan(files, *LORA, "recipe.steps=6", f"run={files / 'same'}"))
    assert curve != same and curve[-1][0] < curve[0][0]
    assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in same], abs=2e-2)


def test_plan_and_dry_run_agree(files: Path) -> None:
    asked = plan(files, *LORA, BASE)
    seen, predicted = dry_run(asked, ranks=[0]).ranks[0], predict(asked).memory[0]
    assert predicted.kinds["parameters"] == seen.kinds["parameters"]


def test_a_folder_of_bitsandbytes_is_taken_as_it_is(files: Path) -> None:
    folder = quantized(files, "bitsandbytes", "llm-int8", outliers="threshold")
    assert open_base(folder).base == "llm-int8"
    asked = beside(files, folder, "recipe.steps=3")
    drawn = plan(files, *LORA, BASE, "recipe.steps=3", f"run={files / 'drawn'}")
    curve, right = ([loss for loss, _ in losses(each)] for each in (asked, drawn))
    assert curve == pytest.approx(right, abs=2e-4), "the folder's embedding and head are in 16 bit"


def test_what_is_no_such_base_is_refused(files: Path) -> None:
    with pytest.raises(IllegalLayout, match=r"llm-int8 rounds each row of activations as a whole.* take layout.tp=1"):
        plan(files, *LORA, BASE, "layout.tp=2").check()
    folder = quantized(files, "bitsandbytes", "llm-int8", outliers="threshold", threshold=3.0)
    with pytest.raises(HubError, match="rounds activations, too"):
        open_base(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT's, bitsandbytes' and transformers' own
def test_twenty_steps_are_those_of_peft_and_bitsandbytes(files: Path) -> None:
    """transformers and bitsandbytes open the folder by themselves; bitsandbytes rounds inputs to fp16 first."""
    pytest.importorskip("bitsandbytes")
    folder = quantized(files, "bitsandbytes", "llm-int8", outliers="threshold")
    asked = beside(files, folder, "recipe.steps=20", "recipe.epsilon=1e-6")
    right = peft_run(asked, files / "peft", 20, device_map="cpu")
    for (loss, norm), (their_loss, their_norm) in zip(losses(asked), right, strict=True):
        assert loss == pytest.approx(their_loss, abs=1e-3)
        assert norm == pytest.approx(their_norm, rel=2e-2)
    assert right[-1][0] < right[0][0] - 0.03
