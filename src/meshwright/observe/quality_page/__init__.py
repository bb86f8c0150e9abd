"""Quality of a quantized model as one HTML page for offline use."""
