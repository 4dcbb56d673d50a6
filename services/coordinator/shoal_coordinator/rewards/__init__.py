"""Reward routes: who scores a group, how a route is replaced while training runs, and what is written down about it."""
