"""Execution on a device: attention kernels, alignment of products, graph sizes, serving defaults."""
