"""Rounds between organisations: over Flower, or through a folder that is watched."""
