"""Head and loss together, without the whole logits."""
