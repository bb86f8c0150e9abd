"""`meshwright doctor`."""
