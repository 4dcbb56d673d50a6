"""From rewards to gradients: pure torch functions, no state and no communication.

Sums over ranks enter through an injected `SumOverRanks` callable, so every function gives the same numbers for every split of a batch.
`shoal.algo.registry` maps configuration names to functions. Formulas, sources and settings: docs/algorithms.md.
"""
