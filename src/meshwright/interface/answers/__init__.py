"""Arguments that Python functions check, and the frozen objects that they answer with: Python, JSON, HTML."""
