"""Serving of a model to many requests: the engine, and HTTP in front of it."""
