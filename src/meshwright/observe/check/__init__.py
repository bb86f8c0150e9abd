"""Checks a plan's communication on every rank, without the ranks: traces of fake worlds, and a checker of traces.

`events` is what a trace says, `sequences`, `buffers` and `deadlock` prove one property each, `checking` runs them all.
None of those four imports torch. `recorder` makes the trace of one rank, `recording` those of a world.
"""
