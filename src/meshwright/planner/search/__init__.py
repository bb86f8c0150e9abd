"""Ranking of every legal layout, bounds that discard most of them uncounted, and effects of single changes."""
