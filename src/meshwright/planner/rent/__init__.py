"""Devices to rent for a run: which, how many, for how long, and for how much, simulated with its failures."""
