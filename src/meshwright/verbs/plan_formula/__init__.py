"""`meshwright plan MODEL --formula`."""
