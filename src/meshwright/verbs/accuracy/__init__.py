"""`meshwright accuracy`."""
