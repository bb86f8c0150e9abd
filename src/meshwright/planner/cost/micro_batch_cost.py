"""Cost of one micro-batch in a part of a model: seconds of its passes, bytes at their moments, and sums of parts."""

from typing import NamedTuple

from meshwright.planner.cost.activations import NONE, Logits


class MicroBatchCost(NamedTuple):
    """Cost of one micro-batch. Seconds include exposed exchanges, which `exchange_s` counts separately."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    exchange_s: float = 0.0
    again_s: float = 0.0
    """Repeated forward passes within input_s."""
    kept_bytes: float = 0.0
    mlp_bytes: float = 0.0
    """Peak of a layer's backward pass beyond what is kept. In Meshwright's engine, of its MLP."""
    attention_bytes: float = 0.0
    """The same in attention of Meshwright's engine."""
    after_bytes: float = 0.0
    """The same between the two, without weight gradients."""
    outside_bytes: float = 0.0
    """The same when the pass reaches or leaves experts, without `inner_bytes`."""
    inner_bytes: float = 0.0
    """Bytes that experts keep."""
    queued_bytes: float = 0.0
    """Kept from a split backward pass to the weight gradients."""
    split_bytes: float = 0.0
    """Peak of a split pass in its last layer, beyond what it leaves."""
    weights: float = 0.0
    """Elements of the largest weight."""
    new_bytes: float = 0.0
    """Its new gradient, part of mlp_bytes."""
    logits: Logits = NONE
    largest_kept_bytes: float = 0.0
    """Kept by the layer that keeps most."""
    host_bytes: float = 0.0
    """Kept in host memory instead."""
    offload_s: float = 0.0
    """Seconds of both passes by which transfers to host memory exceed computation."""

    @property
    def transient_bytes(self) -> float:
        """Peak of a layer's backward pass."""
        return max(self.mlp_bytes, self.attention_bytes)

    @property
    def inputs_bytes(self) -> float:
        """The same of a pass that defers weight gradients."""
        return max(self.mlp_bytes - self.new_bytes, self.attention_bytes)

    @property
    def backward_s(self) -> float:
        """Input and weight gradients together."""
        return self.input_s + self.weight_s

    def plus(self, other: "MicroBatchCost", times: float = 1.0) -> "MicroBatchCost":
        """Return the cost of this part followed by `times` of the other."""
        if not times:
            return self
        return MicroBatchCost(
            forward_s=self.forward_s + times * other.forward_s,
            input_s=self.input_s + times * other.input_s,
            weight_s=self.weight_s + times * other.weight_s,
            exchange_s=self.exchange_s + times * other.exchange_s,
            again_s=self.again_s + times * other.again_s,
            kept_bytes=self.kept_bytes + times * other.kept_bytes,
            mlp_bytes=max(self.mlp_bytes, other.mlp_bytes),
            attention_bytes=max(self.attention_bytes, other.attention_bytes),
            after_bytes=max(self.after_bytes, other.after_bytes),
            outside_bytes=max(self.outside_bytes, other.outside_bytes),
            inner_bytes=max(self.inner_bytes, other.inner_bytes),
            queued_bytes=self.queued_bytes + times * other.queued_bytes,
            split_bytes=max(self.split_bytes, other.split_bytes),
            weights=max(self.weights, other.weights),
            new_bytes=max(self.new_bytes, other.new_bytes),
            logits=self.logits.plus(other.logits, times),
            largest_kept_bytes=max(self.largest_kept_bytes, other.largest_kept_bytes or other.kept_bytes),
            host_bytes=self.host_bytes + times * other.host_bytes,
            offload_s=self.offload_s + times * other.offload_s,
        )

    def offloaded(self, last: "MicroBatchCost", stays_bytes: float, host_bytes_per_s: float) -> "MicroBatchCost":
        """Return the cost of a stage whose blocks except the last keep activations in host memory.

        `stays_bytes` of its input stay. While one block runs backward, the activations of the block before it return.
        """
        # the last block stays: its backward pass begins at once, so a transfer could not hide
        moved = max(0.0, self.kept_bytes - last.kept_bytes - stays_bytes)
        ahead = self.largest_kept_bytes if moved else 0.0
        # each way overlaps with its own pass; only the excess is exposed
        way_s = moved / host_bytes_per_s if host_bytes_per_s else 0.0
        forward_s, backward_s = max(0.0, way_s - self.forward_s), max(0.0, way_s - self.backward_s)
        return self._replace(
            kept_bytes=self.kept_bytes - moved,
            host_bytes=moved,
            mlp_bytes=self.mlp_bytes + ahead,
            attention_bytes=self.attention_bytes + ahead,
            after_bytes=self.after_bytes + ahead,
            outside_bytes=self.outside_bytes + ahead,
            forward_s=self.forward_s + forward_s,
            input_s=self.input_s + backward_s,
            offload_s=forward_s + backward_s,
        )

    def followed_by(self, other: "MicroBatchCost") -> "MicroBatchCost":
        """Return the cost of a stage whose first layers are followed by `other`.

        Its backward pass begins inside `other`, when most is kept, and ends inside the first layers.
        """
        return self.plus(other)._replace(
            mlp_bytes=other.mlp_bytes,
            attention_bytes=other.attention_bytes,
            after_bytes=other.after_bytes,
            outside_bytes=other.outside_bytes,
            inner_bytes=other.inner_bytes,
            split_bytes=self.split_bytes,
        )


NO_COST = MicroBatchCost()
