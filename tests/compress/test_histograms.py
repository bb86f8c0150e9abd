"""Histograms of `quantize --html`: counts, zeros and outlier columns against numpy's, and what the page shows."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.compress.histograms import BINS, STRIPS, count_numbers, rounded_inputs
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.model.quantization_schemes import SCHEMES
from tests.compress.test_formats import SHAPES
from tests.compress.test_quantize import folder as folder  # a Hugging Face directory, and a text beside it


def test_numbers_are_counted_as_numpy_counts_them() -> None:
    numbers = np.random.default_rng(0).normal(0, 1, (40, 70)).astype(np.float32)
    numbers[:4] = 0
    histogram = count_numbers(torch.tensor(numbers))
    counts, edges = np.histogram(numbers, BINS, (float(numbers.min()), float(numbers.max())))
    assert np.abs(np.array(histogram.counts) - counts).sum() <= 2  # a number on an edge may fall to either side
    assert sum(histogram.counts) == numbers.size and histogram.zeros == pytest.approx(0.1)
    assert (histogram.low, histogram.high) == (pytest.approx(edges[0]), pytest.approx(edges[-1]))
    assert sum(count_numbers(torch.zeros(3, 5)).counts) == 15


def test_rounded_inputs_are_those_of_the_product() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 30
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    columns = torch.tensor([7], dtype=torch.int32)
    plain = quantize_matrix("some", weight, SCHEMES["int8-tensor"])
    split = quantize_matrix("some", weight, replace(SCHEMES["llm-int8"], scales="float32"), columns, torch.float32)
    rounded, exact_columns = rounded_inputs(x, plain)
    step = float(x.abs().max()) / 127
    assert exact_columns is None and np.allclose(rounded.numpy(), np.rint(x.numpy() / step) * step, atol=1e-5)
    rounded, exact_columns = rounded_inputs(x, split)
    assert exact_columns == [7] and torch.equal(rounded[:, 7], x[:, 7]) and float((rounded - x).abs().max()) < 0.02
    assert rounded_inputs(x, quantize_matrix("some", weight, SCHEMES["int4-rtn"])) == (x, None)


def test_the_page_draws_every_matrix_and_marks_outliers(folder: Path) -> None:
    answer = mw.quantize(
        folder / "hf", "int8-tensor", folder / "q", data=folder / "text.txt", sequences=16, max_kl=9, histograms=True
    )
    document, page = answer.to_dict(), answer.page()
    assert [each["name"] for each in document["histograms"]] == list(quantizable(SHAPES["llama"]))
    for each in document["histograms"]:
        weight = mw.load(folder / "hf").model.get_parameter(each["name"]).detach().numpy()
        assert sum(each["weights"][0]["counts"]) == sum(each["weights"][1]["counts"]) == weight.size
        assert each["weights"][0]["high"] == pytest.approx(weight.max()) and each["columns"] == weight.shape[1]
        assert each["inputs"][1]["zeros"] >= each["inputs"][0]["zeros"] and not each["kept_apart"]
        assert len(each["column_peaks"]) == -(-each["columns"] // -(-each["columns"] // STRIPS))
        peaks = np.array(each["column_peaks"])
        if each["columns"] <= STRIPS:
            # The median of an even number is the lower one, as torch has it.
            assert each["outliers"] == np.nonzero(peaks > 6 * np.sort(peaks)[(len(peaks) - 1) // 2])[0].tolist()
        name = each["name"].removesuffix(".weight")
        assert page.count(f"<h3>{name}</h3>") == 1
    marked = sum(len(each["outliers"]) for each in document["histograms"])
    assert len(re.findall(r"<rect class='outlier'", page)) <= marked and "<script" not in page
    assert page.count("<svg class='small'") == 3 * len(document["histograms"])
    labels = [unescape(label) for label in re.findall(r"aria-label='(.*?)'", page)]
    assert sum(label.startswith("weights from") for label in labels) == len(document["histograms"])
    without = mw.quantize(folder / "hf", "int8", folder / "q2", data=folder / "text.txt", sequences=16)
    assert without.to_dict()["histograms"] == [] and "Numbers before and after" not in without.page()
