"""Text on disk as rows: files, encodings, malformed rows, and the split into training and validation."""
