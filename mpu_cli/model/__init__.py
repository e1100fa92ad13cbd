"""The model: where it lies, how it is loaded and laid out, its symmetries and what is computed with it."""
