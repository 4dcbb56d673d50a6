"""Scores by reward models: in this process, or on a vLLM server."""
