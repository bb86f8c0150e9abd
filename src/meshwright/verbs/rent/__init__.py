"""`meshwright rent`."""
