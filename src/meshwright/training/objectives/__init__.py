"""Objectives: cross-entropy, preference pairs, distillation, and the reference model."""
