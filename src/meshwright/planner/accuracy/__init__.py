"""Scores of the planner on published runs, and calibration to them."""
