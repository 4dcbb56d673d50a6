"""Numeric cases from a file, run through the functions that training calls: `shoal check-cases FILE.json`.

A family is one handler: the input keys that it knows, and a function for each expected key. `shoal.cases.families` lists them all.
"""
