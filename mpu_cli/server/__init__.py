"""The model owner's side: keys, secret randomness, noise; publish, invert, aggregate, verify."""
