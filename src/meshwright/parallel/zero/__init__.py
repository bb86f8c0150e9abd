"""Data parallelism: replicas, and ZeRO by fully_shard."""
