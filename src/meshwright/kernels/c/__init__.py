"""Compiled C loops for a CPU.

`library` builds and calls those for steps of serving; `training_library` and `sequence_attention` those for training.
"""
