"""Files of this machine, and threads.

`files` opens, locks and maps a file, `replacement` replaces it in one step, `undo` edits its end in
one step, `locking` keeps editors and readers apart, `filesystem` clones files, reserves blocks and
syncs, `beneath` opens files within a directory, `attributes` keeps owner and permissions,
`file_data` and `spooling` provide the bytes of entries, `threads` calls functions in several
threads, and `optional` says how to install a missing library. This room imports only buffers and
errors.
"""
