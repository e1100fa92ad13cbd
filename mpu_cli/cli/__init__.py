"""The command line: a file for each subcommand, which parses, calls one function and prints."""
