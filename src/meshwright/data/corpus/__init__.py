"""Corpus: tokens of a text in a cache on disk, encoded by several processes."""
