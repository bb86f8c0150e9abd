"""Plans of serving: memory, concurrency and times of layouts with tensor and expert parallelism."""
