"""Overheads of software on top of a machine's measured rates, fitted to a few real steps: the end of a calibration.

Method and priors are in fitting.py. Here every scalar starts from a rate that was measured alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

from meshwright.planner.machine.clusterfile import ClusterFile, MeasuredRates
from meshwright.planner.machine.fitting import Adjustment, Scalar, adjusted, changes_at, minimize
from meshwright.spec.plan.plan import Plan

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
"""Further scalars if plans have several ranks."""


def fit_overheads(
    machine: ClusterFile, plans: Sequence[Plan], seconds: Sequence[float], trust: float | None = None
) -> ClusterFile:
    """Fit the scalars that explain the measured steps of these plans. Without plans the machine is unchanged.

    `trust` is as in fitting.minimize: with few plans none can be left out.
    """
    if not plans:
        return machine
    several = any(plan.layout.world > 1 for plan in plans)
    scalars = SCALARS + (AMONG_RANKS if several else ())

    def residuals(x: Sequence[float]) -> list[float]:
        there = _adjust(machine, changes_at(scalars, x))
        return [
            log(there.estimator(plan).predict(plan).step_s / took) for plan, took in zip(plans, seconds, strict=True)
        ]

    x = minimize(residuals, len(scalars), [1.0] * len(plans), trust=trust)
    return _adjust(machine, changes_at(scalars, x))


def _adjust(machine: ClusterFile, changes: Mapping[str, Adjustment]) -> ClusterFile:
    rates, stack = {}, machine.stack
    for ranks, measured in machine.rates.items():
        stack, speeds, links = adjusted(machine.stack, measured.speeds, measured.links, changes)
        rates[ranks] = MeasuredRates(speeds=speeds, links=links)
    return replace(machine, rates=rates, stack=stack)
