"""`meshwright compare`."""
