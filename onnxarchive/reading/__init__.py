"""Reads archives: `open`, `load`, `check`; the archive, its contents, views.

Data flows from a file to its central directory, to the contents, to the archive and its views. Only
`archive_file` opens files.
"""
