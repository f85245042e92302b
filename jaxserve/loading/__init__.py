"""From an engine configuration to an engine that serves: decide, then build."""
