"""`shoal reward`: check and run reward services, score offline, and swap the reward of a run while it trains."""
