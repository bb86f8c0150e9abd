"""Prediction of one layout: memory, time and traffic of a step, and the figures that follow from them."""
