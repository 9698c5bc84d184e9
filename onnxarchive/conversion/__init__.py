"""Conversions of one or many files to archives and back, and comparison of two archives.

`sources` opens the file to convert; `converting` has `convert`, `export` and `extract`. `batch`
finds many models and converts them. `downloading` copies a remote archive to a file; `differences`
compares two archives. This room may import the room `archive` and the rooms below `archive`.
"""
