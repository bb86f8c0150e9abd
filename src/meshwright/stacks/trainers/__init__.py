"""One module per training software: its declaration."""
