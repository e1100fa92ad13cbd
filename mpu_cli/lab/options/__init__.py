"""Options of experiments and of surrogate records."""
