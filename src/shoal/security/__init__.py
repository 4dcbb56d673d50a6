"""Transport security and secrets."""
