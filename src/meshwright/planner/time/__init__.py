"""Time of a step: the schedule played with the planner's seconds, and what a rank sends."""
