"""The chat page that the server shows."""
