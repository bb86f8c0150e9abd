"""A deployment: a model in some format on the GPUs of one engine, and the split of its layers over them."""

from dataclasses import dataclass, field

from meshwright.planner.serving.cached_layers import ServedModel
from meshwright.planner.serving.frameworks import Framework
from meshwright.planner.serving.number_formats import WeightFormats
from meshwright.spec.errors import IllegalLayout, argument
from meshwright.spec.layout.cluster import Device
from meshwright.spec.model.shape import LoRAShape


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDegrees:
    """Degrees of one engine: tp * attention_dp GPUs, which also share the experts as expert_tp * expert_ep."""

    tp: int = 1
    """Ranks that share heads, MLPs and vocabulary."""
    attention_dp: int = 1
    """Groups of tp ranks with their own requests. They meet in the experts."""
    expert_tp: int = 1
    """Ranks that share each expert."""
    expert_ep: int = 1
    """Parts into which the experts are dealt."""

    @property
    def gpus(self) -> int:
        """GPUs of the engine."""
        return self.tp * self.attention_dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One engine."""

    model: ServedModel
    device: Device
    degrees: EngineDegrees
    formats: WeightFormats
    framework: Framework
    cache_width: float = 2.0
    """Bytes of an element of keys and values."""
    drafted: int = 0
    """Tokens that extra layers draft in each step (multi-token prediction). 0 = none."""
    adapters: int = 0
    """Number of adapters held beside the model, each of shape `adapter`."""
    adapter: LoRAShape | None = None
    per_node: int = 8
    """Devices that fast links join."""
    _checked: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape, degrees = self.model.shape, self.degrees
        if shape.heads % degrees.tp:
            raise IllegalLayout(f"{argument('tp', degrees.tp)} does not divide the {shape.heads} heads of {shape.name}")
        if shape.moe and degrees.expert_tp * degrees.expert_ep != degrees.gpus:
            raise IllegalLayout(
                f"expert_tp={degrees.expert_tp} x expert_ep={degrees.expert_ep} is not the {degrees.gpus} GPUs of "
                f"{argument('tp', degrees.tp)} x attention_dp={degrees.attention_dp}"
            )
        if shape.moe and shape.moe.experts % degrees.expert_ep:
            raise IllegalLayout(f"expert_ep={degrees.expert_ep} does not divide {shape.moe.experts} experts")
