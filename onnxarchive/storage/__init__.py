"""Files of this machine: maps, locks, clones, replacing a file, undoing an edit of its end.

`files` opens and maps, `replacement` gives a path new content at once, `undo` changes the end of a
file at once, `locking` keeps processes apart, `beneath` opens within a directory, `attributes`
keeps owner and permissions, and `threads` fetches ahead. This room imports buffers.
"""
