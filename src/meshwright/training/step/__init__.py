"""One optimizer step and its surroundings: batches, evaluation, watchers, interrupts."""
