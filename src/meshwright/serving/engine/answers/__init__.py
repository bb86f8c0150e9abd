"""Answers: options of a request, grammars, tool calls, beams, and text with its stop strings."""
