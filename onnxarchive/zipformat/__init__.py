"""The zip encoding: bytes in, values out, and no file is opened here.

`records` packs and unpacks what APPNOTE describes, `layout` says where an archive's entries lie,
`directory` reads a directory strictly, and `writer` writes one. `foreign` reads the zips of other
tools, and `inflate` their data. This room imports buffers.
"""
