"""`meshwright quickstart`."""
