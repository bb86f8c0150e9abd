"""What Meshwright's serving engine reaches on a machine, as `calibrate` measures it on steps of small models."""

from dataclasses import dataclass

from meshwright.planner.kernels.rate_grid import RateGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Of one process, fp32. Time of a step beside its products and its reading of the cache follows from four
    numbers."""

    step_s: float
    """Of any step: scheduler, tables, sampling."""
    sequence_s: float
    """Of each sequence of a step."""
    layer_s: float
    """Of each layer of a step."""
    token_layer_s: float
    """Of each token in each layer, per number of the hidden state: norms, rotation, activations."""
    cached_bytes_per_s: float
    """Of keys and values that decoding reads."""
    products: RateGrid
    """FLOP per second of products by (m, k, n), m rows of few tokens included."""
