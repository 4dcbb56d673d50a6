"""Scorers that judge by rules: each module but `extraction`, `gold` and `math_*` is a kind."""
