"""`meshwright chat`."""
