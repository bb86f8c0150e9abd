"""Tasks of lm-evaluation-harness: a model on their items, and two models on the same ones."""
