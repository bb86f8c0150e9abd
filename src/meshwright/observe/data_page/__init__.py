"""Training data as one HTML page for offline use."""
