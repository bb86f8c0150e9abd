"""Processes: launch under torchrun, environment, failures, commands that can be copied."""
