"""What arguments name: a plan, a layout, a trained model."""
