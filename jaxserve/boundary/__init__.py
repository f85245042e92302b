"""The data that crosses the engine's boundary: messages, reports and their parts, plain."""
