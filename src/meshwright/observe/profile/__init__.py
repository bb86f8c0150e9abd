"""A few real steps, measured: memory, traffic, time."""
