"""Typed asynchronous clients of Shoal's services. Every call takes a deadline; errors are ShoalErrors."""
