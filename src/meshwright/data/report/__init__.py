"""Reports on the text of a run, for people."""
