"""What is declared of a training software, and how a plan becomes facts for its options and back."""
