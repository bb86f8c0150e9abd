"""Files of other software: Hugging Face folders, GGUF, quantized folders, safetensors."""
