"""`meshwright serve`."""
