"""What Meshwright's serving engine reaches on a machine, as `calibrate` measures it on steps of small models."""

from dataclasses import dataclass

from meshwright.planner.kernels.rate_grid import RateGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Of one process, fp32. Time of a step beside its products and its attention follows from these numbers."""

    step_s: float
    """Of any step: scheduler, tables."""
    sequence_s: float
    """Of each sequence of a step."""
    logit_s: float
    """Of each logit of a sequence: log-probabilities, and the choice of a token."""
    layer_s: float
    """Of each layer of a step."""
    token_layer_s: float
    """Of each token in each layer, per number of the hidden state: norms, rotation, activations."""
    cached_bytes_per_s: float
    """Of keys and values that decoding reads, once for each query head."""
    prompt_flop_per_s: float
    """Of attention over a prompt, of which half the pairs of tokens are counted."""
    products: RateGrid
    """FLOP per second by (bytes of all matrices of a step, m, k, n): a model that the caches hold is read sooner."""
    prompt_layer_s: float = 0.0
    """More, of each layer of a step with a prompt: such a layer is not one call."""
