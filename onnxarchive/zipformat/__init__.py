"""The zip encoding: bytes in, values out, without opening files.

`records` packs and unpacks the records of APPNOTE, `layout` computes offsets and headers, `writer`
writes an archive, and `end_records`, `directory` and `local_header` read one strictly. The three
modules `*_at_once` do the same faster for usual entries. `foreign` and `foreign_end` read zips by
other tools, and `inflate` decompresses their data. This room imports buffers and errors.
"""
