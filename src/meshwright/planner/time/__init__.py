"""The schedule played with those seconds, and what a rank sends in a step."""
