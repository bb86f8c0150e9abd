"""Weights as codes and scales: rounding, products, and blocks of GGUF."""
