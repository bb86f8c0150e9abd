"""Teachers of a distillation: beside the student, or stored."""
