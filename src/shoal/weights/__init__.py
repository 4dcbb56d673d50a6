"""The weight push: planner, stages and deltas without torch; what moves bytes is in `shoal.weights.transports`."""
