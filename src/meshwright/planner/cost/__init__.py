"""Cost of layers, stages and exchanges on one rank: work, seconds and bytes per micro-batch."""
