"""Kinds of memory, as all predictions, measurements and reports name them."""

STATES = ("parameters", "shards", "gradients", "masters", "moments", "counters")
"""Memory that a rank keeps from step to step. Counters are the optimizer's step numbers, one per tensor."""
KINDS = (*STATES, "activations", "logits", "buffers", "temporaries", "tokens", "staging")
"""Memory of tensors, by purpose."""
PLANNED = (*KINDS, "reserve")
"""The same, and the memory that the planner reserves for everything but tensors."""
