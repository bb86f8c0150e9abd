"""`meshwright init`."""
