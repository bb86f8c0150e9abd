"""Rates of Meshwright's serving engine on a machine, as `calibrate` measures them on steps of small models."""

from dataclasses import dataclass

from meshwright.planner.kernels.fitted_kernel import RateGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Rates of one process, fp32. The time of a step apart from its products and its attention follows from them."""

    step_s: float
    """Time of any step: scheduler, tables."""
    sequence_s: float
    """Time of each sequence of a step."""
    logit_s: float
    """Time of each logit of a sequence: log-probabilities, and the choice of a token."""
    layer_s: float
    """Time of each layer of a step."""
    token_layer_s: float
    """Time of each token in each layer, per element of the hidden state: norms, rotation, activations."""
    cached_bytes_per_s: float
    """Rate at which decoding reads keys and values, once for each query head."""
    prompt_flop_per_s: float
    """Rate of attention over a prompt, of which half the pairs of tokens are counted."""
    products: RateGrid
    """FLOP per second by (bytes of all matrices of a step, m, k, n): a model that fits the caches is read faster."""
    prompt_layer_s: float = 0.0
    """Additional time of each layer of a step with a prompt: such a layer is not one call."""
