"""Pipeline parallelism: one executor for all schedules, its stages, and messages between them."""
