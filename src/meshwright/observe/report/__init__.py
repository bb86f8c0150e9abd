"""Report of runs as one HTML page for offline use."""
