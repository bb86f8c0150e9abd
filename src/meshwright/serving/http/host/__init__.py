"""Process of the model behind the server: the engine, its thread, and adapters by request."""
