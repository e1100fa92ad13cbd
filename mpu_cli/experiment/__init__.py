"""Whole experiments with both parties on one machine, using the same functions as the separate commands."""
