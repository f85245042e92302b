"""One file a group of routes; `ROUTES` of each is mounted by the application."""
