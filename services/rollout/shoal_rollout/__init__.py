"""Rollout service: one vLLM engine per process, token ids in, token ids out, weights swapped in place."""
