"""Requests: fields, messages as tokens, tools."""
