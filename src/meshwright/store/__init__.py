"""What a run folder holds on disk: metrics, checkpoints, random state, locks. Read and written without the trainer."""
