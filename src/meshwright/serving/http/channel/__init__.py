"""Messages between the process of the model and that of HTTP."""
