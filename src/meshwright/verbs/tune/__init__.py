"""`meshwright tune`."""
