"""`meshwright launch`."""
