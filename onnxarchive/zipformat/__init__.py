"""The zip encoding, read and written, without opening files.

`records` packs and unpacks the records of APPNOTE, `layout` computes offsets and headers, `writer`
writes an archive, and `end_records`, `directory` and `local_header` read an archive strictly. This
room imports `files.data` and errors.
"""
