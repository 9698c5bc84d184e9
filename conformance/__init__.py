"""The conformance suite: vectors, their recipes, and a runner."""
