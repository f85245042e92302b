"""What crosses the engine's boundary: messages, reports and what they consist of, as plain data."""
