"""`meshwright plan --from`."""
