"""Contents of a run folder on disk: metrics, checkpoints, random state, locks. Independent of the trainer."""
