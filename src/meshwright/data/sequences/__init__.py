"""Sequences: numbered windows and packed samples, in a shuffled order."""
