"""Where commands look for a coordinator."""

DEFAULT_ADDRESS = "http://127.0.0.1:8080"
"""Of its REST API, unless --address says otherwise."""
