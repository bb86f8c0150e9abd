"""The process around a command: environment variables, launch under torchrun, exit codes."""
