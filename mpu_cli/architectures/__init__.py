"""Descriptions of the model families: their tensors, what the axes mean, and the symmetries they allow."""
