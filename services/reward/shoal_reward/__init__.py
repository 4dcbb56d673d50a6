"""The reward service: named, versioned scorers behind `shoal.rpc.v1.RewardService`."""
