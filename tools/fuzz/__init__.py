"""Fuzzing, comparison with other zip readers, and changes of a reader that vectors must notice."""
