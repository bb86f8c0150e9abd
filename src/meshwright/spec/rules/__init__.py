"""Rules that a plan must obey, each with the nearest legal change."""
