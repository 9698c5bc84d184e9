"""Archives: reading, checking, writing, editing and recovery.

`opening` gives an `Archive` (`reading`). `contents` reads a file and checks CRC-32s; a `snapshot`
of it finds the bytes of entries, and `views` show them as tensors and assets, `html` as tables in
notebooks. `rules` checks an archive. `planning` decides by `options` which tensors go outside the
model, and `writing` writes the plan (`small_items` many small entries together, for speed): of a
model in memory (`saving`) or given tensor by tensor (`streaming`, `given_tensors`); `libraries`
recognises objects of other libraries. `onnx_ir` loads and saves models of that library. `referring`
has models whose tensors are entries of an archive. `editing` locks an archive, `rewriting` and
`entry_edits` write its new end or a new file, and `recovery` rolls back an interrupted edit. This
room imports sources, storage, model, zipformat and buffers.
"""
