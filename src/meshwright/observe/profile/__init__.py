"""Profile of a few real steps: memory, traffic, time."""
