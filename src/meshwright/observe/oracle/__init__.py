"""Layouts of many devices against one device: the matrix of features, and its reference."""
