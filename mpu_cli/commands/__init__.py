"""The commands of the protocol, a module each: options, checks, work, and what is said of the result."""
