"""Measures what a model still knows and what it can still do."""
