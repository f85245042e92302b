"""One file a subcommand: `register` adds its flags, its `run` does the work."""
