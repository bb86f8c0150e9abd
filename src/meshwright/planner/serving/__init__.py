"""Plans of serving: memory, largest concurrency, and time of prefill and decoding for layouts by tensor parallel."""
