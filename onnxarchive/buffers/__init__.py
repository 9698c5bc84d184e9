"""Bytes that lie somewhere: the lowest room.

`data` has what an entry's bytes may be (`Data`), `checksums` their CRC-32, `counting` the progress
of going through them, `columns` numbers and names taken together with numpy, for speed only. This
room imports nothing of the package but its errors.
"""
