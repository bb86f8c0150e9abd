"""What the host does for a step beside its graph, held at its numbers."""

import pytest

from benchmarks.host_step import SAMPLINGS, counted_host
from meshwright.spec import presets

COUNTS = {"greedy": (1, 1, 7, 28), "sampled": (2, 1, 28, 61), "top_p": (2, 2, 57, 102)}
"""Copies to the device and to the host, kernels, and operations; whatever the number of rows."""
CALLS = {"greedy": 20, "sampled": 24, "top_p": 24}
"""Of Python functions for each row, beside 120 of a step."""


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 16])
def test_copies_and_operations(sampling: str, batch: int) -> None:
    counts = counted_host(presets.model("llama-tiny"), batch, 40, sampling)
    step = counts.step
    assert step is not None and not step.waits, "the host waits for nothing but tokens"
    assert (counts.to_device, counts.to_host, len(step.launches), step.dispatches) == COUNTS[sampling]
    assert step.calls <= 120 + CALLS[sampling] * batch
