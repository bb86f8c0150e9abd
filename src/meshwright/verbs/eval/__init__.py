"""`meshwright eval`."""
