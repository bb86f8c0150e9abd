"""`meshwright data`."""
