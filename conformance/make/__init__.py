"""The recipes of the vectors; `python3 -m conformance.make` makes the files."""
