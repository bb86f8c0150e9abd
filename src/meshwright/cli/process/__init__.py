"""The process around a command: environment, launch under torchrun, exit codes."""
