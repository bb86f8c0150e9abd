"""The layout explorer: one HTML page for offline use."""
