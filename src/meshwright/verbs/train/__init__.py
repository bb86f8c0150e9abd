"""`meshwright train`."""
