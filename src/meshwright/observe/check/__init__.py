"""Checks of a plan's communication on every rank without the ranks.

`recorder` makes the trace of one rank in a fake world, `recording` those of all ranks. `sequences`, `deadlock` and the
buffer rule in `rules` prove one property each; `rules` runs them all. `events`, `sequences`, `deadlock` and `rules`
import no torch.
"""
