"""A Traffic that also writes down every call."""

from meshwright.parallel.groups.group import Traffic


class Told(Traffic):
    """`calls`: (axis, collective, bytes sent by this rank) in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []

    def tell(self, axis: str, collective: str, sent_bytes: int) -> None:
        super().tell(axis, collective, sent_bytes)
        self.calls.append((axis, collective, sent_bytes))
