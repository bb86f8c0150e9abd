"""`meshwright report`."""
