"""The real scheduler on a simulated clock, and plans of capacity made with it."""
