"""Code answers, run against unit tests in a sandboxed process."""
