"""Files of this machine, and threads.

`files` opens, locks and maps a file, `replacement` replaces it in one step, `undo` edits its end in
one step, `locking` keeps editors and readers apart, `filesystem` clones files, syncs, and checks
free space and paths, `beneath` opens files within a directory, `attributes` keeps owner and
permissions, `file_data` and `spooling` provide the bytes of entries, `threads` calls functions in
several threads, and `optional` recognises objects of optional libraries and says how to install
these. This room imports only buffers and errors.
"""
