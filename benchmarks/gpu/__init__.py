"""Kernels and whole steps on one GPU, each beside its rivals: see docs/benchmarks/README.md."""
