"""`meshwright runs`: list, verify and prune checkpoints on disk or behind a URL."""
