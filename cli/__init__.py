"""The command line: what a terminal needs around the reference. Nothing but the commands imports
it."""
