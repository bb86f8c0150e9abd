"""`meshwright profile`."""
