"""Recomputation and offload of activations."""
