"""Calls to servers that score over HTTP: one limit, one rule for retries, one for errors."""
