"""What people see: tables, charts, the live panel, streamed text."""
