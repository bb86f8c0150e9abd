"""Recipe of a run: everything that may change its loss."""
