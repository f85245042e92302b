"""What the engine tells the outside about itself."""
