"""The commands of the protocol, a module each: options, checks, work, and the report of the result."""
