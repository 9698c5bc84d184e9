"""Makes the reference, pictures and tables of the documents; runs the README's snippets."""
