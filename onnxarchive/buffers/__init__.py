"""The bytes of entries, in memory or elsewhere: the lowest room.

`data` has the types of an entry's bytes (`Data`), `checksums` their CRC-32, `counting` the progress
of reading them, `file_names` the check of a plain path. `columns` and `lines` have many numbers and
names, for speed only. This room imports nothing of the package but its errors.
"""
