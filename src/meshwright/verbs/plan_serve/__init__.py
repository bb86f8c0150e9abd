"""`meshwright plan --serve`."""
