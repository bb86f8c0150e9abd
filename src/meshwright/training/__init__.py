"""Training: step, loop, checkpoint, watchers of a run."""
