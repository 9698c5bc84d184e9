"""Files of this machine, and data: bytes somewhere, CRC-32, maps, locks, replacing, undo logs.

This room knows nothing of zips and models.
"""
