"""How much of the logits a loss makes at once (kernels/cross_entropy.py, kernels/linear_divergence.py)."""

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Of fp32 logits in a chunk, by kind of device."""
ADDED_AT_ONCE = 2**19
"""Numbers of a rounded product of 16 bits that a CPU adds to sums in fp32 at a time: 1 MiB, and 2 MiB widened."""
