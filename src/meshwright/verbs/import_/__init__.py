"""`meshwright import`."""
