"""What software adds to the measured rates of a machine, fitted to a few real steps on it: the last part of a
calibration. Method and priors: fitting.py; here every scalar starts from what was measured alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

from meshwright.planner.machine.clusterfile import ClusterFile, Together
from meshwright.planner.machine.fitting import Adjustment, Scalar, changed, changes_at, minimum
from meshwright.spec.plan import Plan

SCALARS = (
    Scalar("speeds.product_share", "times", 0.4),
    Scalar("speeds.memory_share", "times", 0.4),
    Scalar("speeds.attention_forward", "times", 0.3),
    Scalar("speeds.attention_backward", "times", 0.3),
    Scalar("speeds.launch_s", "times", 0.7),
    Scalar("speeds.host_share", "times", 0.5),
    Scalar("stack.host_s", "times", 0.5),
    Scalar("stack.stalls", "plus", 0.2),
    Scalar("stack.passes", "times", 0.3),
    Scalar("stack.swiglu_passes", "times", 0.3),
    Scalar("stack.gelu_passes", "times", 0.3),
    Scalar("stack.loss_passes", "times", 0.3),
    Scalar("stack.norm_passes", "times", 0.3),
    Scalar("stack.rope_passes", "times", 0.3),
    Scalar("stack.step_s", "plus", 0.005),
    Scalar("stack.micro_batch_s", "plus", 0.002),
)
AMONG_RANKS = (
    Scalar("links.curve_share", "times", 0.4),
    Scalar("stack.skew", "plus", 0.3),
    Scalar("stack.send_s", "plus", 0.001),
    Scalar("stack.hides_gradients", "plus", 0.2),
    Scalar("stack.hides_weights", "plus", 0.2),
)
"""Beside them, where plans have several ranks."""


def fitted(
    machine: ClusterFile, plans: Sequence[Plan], seconds: Sequence[float], trust: float | None = None
) -> ClusterFile:
    """The machine with the scalars that explain the measured steps of these plans; without plans as it was. `trust` as
    in fitting.minimum: of a few plans none can be left out."""
    if not plans:
        return machine
    several = any(plan.layout.world > 1 for plan in plans)
    scalars = SCALARS + (AMONG_RANKS if several else ())

    def residuals(x: Sequence[float]) -> list[float]:
        there = _changed(machine, changes_at(scalars, x))
        return [
            log(there.estimator(plan).predict(plan).step_s / took) for plan, took in zip(plans, seconds, strict=True)
        ]

    x = minimum(residuals, len(scalars), [1.0] * len(plans), trust=trust)
    return _changed(machine, changes_at(scalars, x))


def _changed(machine: ClusterFile, changes: Mapping[str, Adjustment]) -> ClusterFile:
    together, stack = {}, machine.stack
    for ranks, one in machine.together.items():
        stack, speeds, links = changed(machine.stack, one.speeds, one.links, changes)
        together[ranks] = Together(speeds=speeds, links=links)
    return replace(machine, together=together, stack=stack)
