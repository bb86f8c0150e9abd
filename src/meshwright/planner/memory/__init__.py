"""Peak memory of a pipeline rank, from the schedule played with the planner's bytes."""
