"""Objects at URLs and in stores, read by range and written whole.

`urls` recognises URLs and shows them without secrets, `stores` finds the library for one (obstore
or fsspec) and makes its requests, `failures` turns the libraries' errors into this package's,
`background` runs many requests at once, `redirects` keeps secrets from other servers. `objects`
reads an object, `cache` keeps what was read on this machine, `writing` writes an object, `listing`
lists those of a bucket. This room imports storage and buffers.
"""
