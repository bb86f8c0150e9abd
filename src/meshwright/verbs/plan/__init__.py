"""`meshwright plan`."""
