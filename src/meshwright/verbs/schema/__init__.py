"""`meshwright schema`."""
