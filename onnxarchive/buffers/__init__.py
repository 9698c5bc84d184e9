"""Bytes in memory or elsewhere, their CRC-32, and reports of progress.

`data` has the types for an entry's bytes (`Data`), `checksums` computes CRC-32, `counting` reports
progress, `file_names` checks paths. This room imports no other room.
"""
