"""Modules with the arguments, the example and the function of each command."""
