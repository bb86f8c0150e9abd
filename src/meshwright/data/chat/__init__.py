"""Conversations: samples, chat templates, and the tokens that are trained on."""
