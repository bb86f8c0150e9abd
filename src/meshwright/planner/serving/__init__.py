"""Plans of serving: memory, largest concurrency, and times of prefill and decoding, for layouts by tensor parallel."""
