"""Several adapters beside one base, which is loaded once: each in turn merged into its matrices and taken out again."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.api.adapter_opening import opened_adapter
from meshwright.api.trained_model import TrainedModel
from meshwright.model.low_rank import merged
from meshwright.spec.errors import ArgumentError
from meshwright.spec.inventory import adapter_parts


@dataclass(slots=True)
class AdaptersInTurn:
    """One model in memory, and folders of adapters by name."""

    base: TrainedModel
    folders: Mapping[str, Path]
    _plain: dict[str, Tensor] = field(default_factory=dict)
    """On the host: matrices as they are without the adapter that is merged now."""

    def plain(self) -> TrainedModel:
        """The base as it was loaded, to the bit."""
        places = self.base.model.state_dict()
        with torch.no_grad():
            for name, tensor in self._plain.items():
                places[name].copy_(tensor)
        self._plain.clear()
        return self.base

    def with_adapter(self, name: str) -> TrainedModel:
        """The base with one adapter in its matrices, until the next is asked for. ArgumentError, HubError or
        CheckpointError where it cannot be had, or belongs to another base."""
        places = self.plain().model.state_dict()
        adapter = opened_adapter(name, self.folders[name], self.base.model, self.base.path)
        adapted = {key: parts for key in places if (parts := adapter_parts(key, adapter.tensors))}
        if sum(map(len, adapted.values())) < len(adapter.tensors):
            raise ArgumentError(
                f"adapter={name} cannot be merged: {self.base.path} holds the adapted matrices as codes. Evaluate "
                "it beside the model before quantization"
            )
        with torch.no_grad():
            for key, parts in adapted.items():
                place = places[key]
                self._plain[key] = place.to("cpu", copy=True)
                low = {part: tensor.to(place.device) for part, tensor in parts.items()}
                place.copy_(merged(place.float(), low, adapter.lora))
        if not self._plain:
            raise ArgumentError(f"adapter={name}: {self.folders[name]} adapts no matrix of {self.base.path}")
        return replace(self.base, path=self.folders[name])
