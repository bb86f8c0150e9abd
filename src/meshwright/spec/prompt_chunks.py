"""How much of prompts a step of the serving engine reads while answers grow: engine and planner follow it."""

BESIDE_ANSWERS = 128
"""Tokens, on a CPU. There a step's time grows with its tokens, so a long chunk makes everybody wait; more tokens than
these at once are hardly read sooner. On a GPU a step reads all that it has room for."""
