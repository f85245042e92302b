"""Whether a process still runs and an engine still answers."""
