"""Pure zip: aligned, stored entries. Knows nothing of ONNX and of file names; bytes in, values out.

`records` holds every signature, size, flag and sentinel; `layout` decides where things lie;
`directory` reads and `writer` writes.
"""
