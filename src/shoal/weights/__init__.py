"""The weight push: planner, stages and digests in plain Python; what moves bytes is in `shoal.weights.transports`."""
