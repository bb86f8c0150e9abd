"""The training program on fake tensors in a simulated process group: peak memory by tensor, and traffic."""
