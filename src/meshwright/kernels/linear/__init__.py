"""Linear layers, gated MLPs and their gradients, in fp32, 16 bits and fp8."""
