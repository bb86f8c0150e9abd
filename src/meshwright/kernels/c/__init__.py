"""Compiled C loops for a CPU.

`library` builds and calls those for steps of serving; `training_rows` and `sequence_attention` those for training.
"""
