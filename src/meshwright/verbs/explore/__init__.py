"""`meshwright explore`."""
