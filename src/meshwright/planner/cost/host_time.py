"""What the host takes for a layer where it is the device itself: interpreter, dispatch, autograd, views, bookkeeping.

On a GPU launches run ahead of the kernels (Stack.host_s); on a CPU nothing runs beside them, and a layer takes its
kernels and, on top, all that calls them. `calibrate` measures that on layers that have next to nothing to compute.
"""

from dataclasses import dataclass, fields

from meshwright.spec.shape import ModelShape

Triple = tuple[float, float, float]
"""Seconds (forward, backward, what selective recomputation adds at most, where it makes anything again)."""
NOTHING: Triple = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Seconds of one layer and micro-batch, beyond what its kernels take by themselves."""

    swiglu: Triple = NOTHING
    """A dense layer with a gated MLP."""
    gelu: Triple = NOTHING
    """A dense layer with a plain one."""
    routed: Triple = NOTHING
    """A mixture of experts: router, dispatch and combine, attention too."""
    expert: Triple = NOTHING
    """Beyond that, of each expert that a rank holds."""

    def layer(self, shape: ModelShape, *, routed: bool, experts: float) -> Triple:
        """Of a layer with so many experts on the rank."""
        if not routed:
            return self.swiglu if shape.mlp == "swiglu" else self.gelu
        a, b, c = (base + experts * each for base, each in zip(self.routed, self.expert, strict=True))
        return a, b, c


KINDS = tuple(one.name for one in fields(Host))
