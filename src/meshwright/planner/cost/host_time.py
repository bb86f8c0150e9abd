"""Host time of a layer where the host is the device: interpreter, dispatch, autograd, views, bookkeeping.

On a GPU launches run ahead of the kernels (Stack.host_s). On a CPU nothing runs beside them, so a layer takes its
kernels plus everything that calls them. `calibrate` measures that with layers that compute almost nothing.
"""

from dataclasses import dataclass, fields

from meshwright.spec.model.shape import ModelShape

Triple = tuple[float, float, float]
"""Seconds (forward, backward, the most that selective recomputation adds where it repeats anything)."""
NOTHING: Triple = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Seconds of one layer and micro-batch beyond those of its kernels."""

    swiglu: Triple = NOTHING
    """A dense layer with a gated MLP."""
    gelu: Triple = NOTHING
    """A dense layer with a plain MLP."""
    routed: Triple = NOTHING
    """A mixture of experts: attention, router, dispatch and combine."""
    expert: Triple = NOTHING
    """Added by each expert that a rank holds."""

    def layer(self, shape: ModelShape, *, routed: bool, experts: float) -> Triple:
        """Return the seconds of a layer with this number of experts on the rank."""
        if not routed:
            return self.swiglu if shape.mlp == "swiglu" else self.gelu
        a, b, c = (base + experts * each for base, each in zip(self.routed, self.expert, strict=True))
        return a, b, c


KINDS = tuple(kind.name for kind in fields(Host))
