"""Both parties on one machine: whole experiments, with the functions that the separate commands call."""
