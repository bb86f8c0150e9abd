"""`meshwright verify`."""
