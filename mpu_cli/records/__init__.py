"""Records: reading them from files and data sets, and turning them into tokens."""
