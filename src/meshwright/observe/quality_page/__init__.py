"""What a quantized model lost as one HTML page for offline use."""
