"""`meshwright distill`."""
