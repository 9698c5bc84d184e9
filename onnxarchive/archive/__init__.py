"""Archives: reading, checking, writing, editing and recovery.

Reading: `opening` opens an `Archive` (`reading`), `openable` its source. `contents` reads directory
and models, `local_headers` compares the local headers, `snapshot` finds the bytes of entries, which
`views` shows as tensors and assets, `html` as tables in notebooks. `rules` checks an archive.

Writing: `planning` decides by `options` which tensors are stored outside the model, as `items`, and
`sharing` which ones models share. `writing` writes the plan (`small_items` many small entries at
once, for speed). `saving` saves models in memory, `streaming` given tensors (`given_tensors`).
`libraries` recognises objects of other libraries, `onnx_ir` loads and saves models of that one.

Editing: `editing` and `editable` lock an archive, `rewriting` and `entry_edits` write its new end
or a new file, `recovery` rolls back an interrupted edit. `referring` has models whose tensors are
entries of an archive. This room imports sources and all rooms below.
"""
