"""Kinds of memory: each package that counts, predicts or shows memory names it so, and so do ledgers of runs."""

STATES = ("parameters", "shards", "gradients", "masters", "moments", "counters")
"""What a rank keeps from step to step; counters are the optimizer's step numbers, one for each tensor."""
KINDS = (*STATES, "activations", "logits", "buffers", "temporaries", "tokens", "staging")
"""All memory that tensors take, by what it is for."""
PLANNED = (*KINDS, "reserve")
"""And what the planner sets aside for what is no tensor."""
