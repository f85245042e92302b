"""What one request may ask for: its prompt and its parameters, checked when they are made."""
