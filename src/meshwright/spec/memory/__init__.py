"""Memory of a rank by kind, and buffers whose sizes the engine and the planner share."""
