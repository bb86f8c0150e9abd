"""Calls of blocks: compiled, recomputed, and with activations in host memory."""
