"""What is trained as one HTML page for offline use."""
