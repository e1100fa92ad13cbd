"""Measuring a model: what it still knows, what it can still do."""
