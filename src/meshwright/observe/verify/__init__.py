"""Layouts beside one device: fixed ones, and random ones."""
