"""Answers as documents of OpenAI's interface."""
