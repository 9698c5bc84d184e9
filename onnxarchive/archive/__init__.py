"""Archives: reading, checking and writing.

Reading: `opening` opens an `Archive`, the class in `reading`; `locked_file` opens the file of an
archive while no edit runs. `contents` reads directory and models, and the bytes of entries. `views`
shows entries as tensors and assets, `html` as tables in notebooks. `rules` checks an archive.

Writing: `planning` plans the entries by `options`; `sharing` finds tensors that models share.
`writing` writes a plan. `saving` saves whole models; `streaming` saves one tensor after another,
and `elements` reads these tensors. `onnx_ir` loads and saves models of onnx_ir.

`unfinished` finds the undo log of an interrupted edit. `referring` saves a model in memory whose
external tensors have keys of an open archive as locations; `linked_models` makes models whose
external tensors are in the archive's file or in a data file.

This room imports only from `sources` and from the rooms below `sources`.
"""
