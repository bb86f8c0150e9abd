"""`meshwright export`."""
