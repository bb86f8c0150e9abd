"""Compiled blocks and CUDA graphs of passes."""
