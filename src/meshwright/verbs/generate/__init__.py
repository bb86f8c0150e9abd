"""`meshwright generate`."""
