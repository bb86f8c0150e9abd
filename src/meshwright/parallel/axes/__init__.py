"""Axes of a layout inside a layer: tensor, sequence, expert and context parallelism."""
