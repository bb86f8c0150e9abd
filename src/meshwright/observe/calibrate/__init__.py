"""This machine measured for the planner."""
