"""Files behind URLs: object stores, the Hugging Face Hub, memory. Through fsspec."""
