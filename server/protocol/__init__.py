"""The HTTP surface as data: request models, response builders, what is refused."""
