"""Is this machine, or this cluster, fit to train: checks, each with what is wrong and what to do."""
