"""What software adds to the measured rates of a machine, fitted to a few real steps on it: the last part of a
calibration. Method and priors as in fit.py; here every scalar starts from what was measured alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log

from meshwright.planner.accuracy.calibration import Change, Parameter, changed, minimum
from meshwright.planner.machine.clusterfile import ClusterFile, Together
from meshwright.spec.plan import Plan

PARAMETERS = (
    Parameter("speeds.product_share", "times", 0.4),
    Parameter("speeds.memory_share", "times", 0.4),
    Parameter("speeds.attention_forward", "times", 0.3),
    Parameter("speeds.attention_backward", "times", 0.3),
    Parameter("speeds.launch_s", "times", 0.7),
    Parameter("speeds.host_share", "times", 0.5),
    Parameter("stack.host_s", "times", 0.5),
    Parameter("stack.stalls", "plus", 0.2),
    Parameter("stack.passes", "times", 0.3),
    Parameter("stack.swiglu_passes", "times", 0.3),
    Parameter("stack.gelu_passes", "times", 0.3),
    Parameter("stack.loss_passes", "times", 0.3),
    Parameter("stack.norm_passes", "times", 0.3),
    Parameter("stack.rope_passes", "times", 0.3),
    Parameter("stack.step_s", "plus", 0.005),
    Parameter("stack.micro_batch_s", "plus", 0.002),
)
AMONG_RANKS = (
    Parameter("links.curve_share", "times", 0.4),
    Parameter("stack.skew", "plus", 0.3),
    Parameter("stack.send_s", "plus", 0.001),
    Parameter("stack.hides_gradients", "plus", 0.2),
    Parameter("stack.hides_weights", "plus", 0.2),
)
"""Beside them, where plans have several ranks."""


def fitted(
    machine: ClusterFile, plans: Sequence[Plan], seconds: Sequence[float], trust: float | None = None
) -> ClusterFile:
    """The machine with the scalars that explain the measured steps of these plans; without plans as it was. `trust` as
    in fit.minimum: of a few plans none can be left out."""
    if not plans:
        return machine
    several = any(plan.layout.world > 1 for plan in plans)
    parameters = PARAMETERS + (AMONG_RANKS if several else ())

    def residuals(x: Sequence[float]) -> list[float]:
        there = _changed(machine, _changes(parameters, x))
        return [
            log(there.estimator(plan).predict(plan).step_s / took) for plan, took in zip(plans, seconds, strict=True)
        ]

    x = minimum(residuals, len(parameters), [1.0] * len(plans), trust=trust)
    return _changed(machine, _changes(parameters, x))


def _changes(parameters: Sequence[Parameter], x: Sequence[float]) -> dict[str, Change]:
    return {
        one.name: (one.kind, exp(one.spread * at) if one.kind == "times" else one.spread * at)
        for one, at in zip(parameters, x, strict=True)
    }


def _changed(machine: ClusterFile, changes: Mapping[str, Change]) -> ClusterFile:
    together, stack = {}, machine.stack
    for ranks, one in machine.together.items():
        stack, speeds, links = changed(machine.stack, one.speeds, one.links, changes)
        together[ranks] = Together(speeds=speeds, links=links)
    return replace(machine, together=together, stack=stack)
