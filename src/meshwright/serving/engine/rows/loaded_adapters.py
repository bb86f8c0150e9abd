"""The adapters of an engine by name: loaded at any time, and unloaded when no sequence uses them any more.

Each loading has its own number, which begins the prefixes of its sequences in the cache. What was computed with an
adapter is never found by another one of the same name, nor by the same one after it was loaded again.
"""

from collections.abc import Callable, Collection
from typing import final

import torch

from meshwright.model.transformer import Transformer
from meshwright.serving.engine.rows.request_adapters import RequestAdapters, ServedAdapter
from meshwright.serving.engine.rows.serving_ranks import ServingRanks
from meshwright.spec.errors import ArgumentError, DoesNotFit, argument, is_out_of_memory


@final
class LoadedAdapters:
    """Adapters for the engine's thread. Other threads may read `names`."""

    def __init__(
        self, model: Transformer, used: Callable[[], Collection[int]] = tuple, *, exact: bool,
        ranks: ServingRanks | None = None,
    ) -> None:  # fmt: skip
        """Start without adapters.

        Args:
            used: Returns the numbers that sequences use now.
            ranks: Ranks with the other parts of the model.
        """
        self._model, self._ranks, self._used = model, ranks, used
        self.by_number = RequestAdapters(model, exact=exact, multiple=1 if ranks is None else ranks.row_multiple)
        self.names: tuple[str, ...] = ()
        """Names that requests may use, in order of loading."""
        self._numbers: dict[str, int] = {}
        self._leaving = set[int]()
        self._last = 0

    @property
    def count(self) -> int:
        """Number of adapters in memory: those of `names`, and unloaded ones that sequences still use."""
        return len(self._numbers) + len(self._leaving)

    @property
    def bytes(self) -> int:
        """Memory of all held adapters on this rank."""
        return self.by_number.bytes

    def number(self, name: str | None) -> int:
        """Return the number of the adapter with that name. None -> 0. Raises ArgumentError for an unknown name."""
        if name is None:
            return 0
        if name not in self._numbers:
            known = f"take one of {', '.join(self.names)}" if self.names else "the engine was given none"
            raise ArgumentError("adapter", name, "is not here", f"{known}")
        return self._numbers[name]

    @torch.no_grad()
    def load(self, name: str, adapter: ServedAdapter) -> None:
        """Let requests use a name.

        Raises ArgumentError when it is taken or the adapter cannot be served, DoesNotFit without memory for it,
        RunError when a rank is gone.
        """
        if not name:
            raise ArgumentError("adapter", rule="must have a name, which requests say")
        if name in self._numbers:
            raise ArgumentError("adapter", name, "is here already", "unload it first, or take another name")
        adapter.check(name, self._model)
        self._last += 1
        if not self._put(self._last, adapter):
            raise DoesNotFit(
                f"{argument('adapter', name)} does not fit in memory next to the model: unload another one, or "
                "give the cache less memory"
            )
        self._numbers[name] = self._last
        self.names = tuple(self._numbers)

    def _put(self, number: int, adapter: ServedAdapter) -> bool:
        """Load it on all ranks. Return False, and have it on none, when one has no memory for it."""
        try:
            tensors = adapter.scale_tensors(self._model.embed.weight.dtype)
            if self._ranks is not None:
                return self._ranks.share_adapter(number, tensors, adapter.lora, self.by_number)
            self.by_number.put(number, tensors)
        except Exception as error:
            self.by_number.drop(number)
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def unload(self, name: str) -> None:
        """Let no new request use the name. Running ones keep the adapter. Raises ArgumentError for an unknown name."""
        self._leaving.add(self.number(name))
        del self._numbers[name]
        self.names = tuple(self._numbers)
        self.release()

    def release(self) -> None:
        """Drop unloaded adapters that no sequence uses any more. Raises RunError when a rank is gone."""
        for number in sorted(self._leaving.difference(self._used())) if self._leaving else ():
            if self._ranks is not None:
                self._ranks.drop_adapter(number)
            self.by_number.drop(number)
            self._leaving.remove(number)
