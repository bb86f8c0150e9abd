"""The training program run on fake tensors in a simulated process group: peak memory, tensor by tensor, and traffic."""
