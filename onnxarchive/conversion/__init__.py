"""Conversions of other files to archives and back, one or many, and comparing two archives.

`sources` opens the file to convert, `converting` has `convert`, `export` and `extract`, `batch`
many conversions at once, `differences` the comparison. This room imports archive and below.
"""
