"""Scores by a language model that reads a rubric."""
