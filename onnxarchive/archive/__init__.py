"""Archives: reading, checking, writing, editing and recovery.

`opening` gives an `Archive` (`reading`); its state is a `Snapshot` of the file's `contents`, and
`views` show its tensors and assets. `rules` checks an archive. A model is planned (`planning`) with
its `options`, then written (`writing`), from memory (`saving`) or tensor by tensor (`streaming`).
`onnx_ir` loads and saves models of that library.
`editing` locks an archive, `rewriting` writes its new end or a new file, and `recovery` rolls back
an interrupted edit. This room imports sources, storage, model, zipformat and buffers.
"""
