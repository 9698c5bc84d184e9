"""Other zip readers, called the same way."""
