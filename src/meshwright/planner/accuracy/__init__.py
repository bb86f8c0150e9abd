"""The planner scored on published runs, and calibrated to them."""
