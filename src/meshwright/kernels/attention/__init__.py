"""Attention: dense, packed, windowed, paged, on a CPU and on GPUs; one chooser for each device."""
