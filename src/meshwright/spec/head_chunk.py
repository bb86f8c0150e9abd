"""How much of the logits a loss makes at once (kernels/cross_entropy.py, kernels/linear_divergence.py)."""

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Of fp32 logits in a chunk, by kind of device."""
