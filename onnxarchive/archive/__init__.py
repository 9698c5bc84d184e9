"""Archives: opened, looked at, checked, planned, written, edited and recovered.

`opening` gives an `Archive` (`reading`), whose state is a `Snapshot` of a file's `contents`. What
is written is planned first (`planning`), then streamed (`writing`); `saving` and `streaming` are
the two ways in. `editing` locks an archive, and `rewriting` gives it a new end or a new file. This
room imports sources, storage, model, zipformat and buffers.
"""
