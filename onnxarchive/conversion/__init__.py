"""Conversions of one or many files to archives and back; downloads of remote archives."""
