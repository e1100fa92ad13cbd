"""Whose copy a model is: evidence in its weights, or in what it answers."""
