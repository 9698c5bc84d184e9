"""Makes the reference and the table of messages; runs the README's snippets."""
