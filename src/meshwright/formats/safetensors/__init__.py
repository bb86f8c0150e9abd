"""Safetensors files, read tensor by tensor."""
