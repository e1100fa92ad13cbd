"""The server's side: publications and their keys, noise, and the way back from deltas to a model."""
