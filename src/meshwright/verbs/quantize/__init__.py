"""`meshwright quantize`."""
