"""Objects at URLs and in stores, read by range and written whole.

`urls` recognises URLs and shows them without secrets, `stores` finds the library for one (obstore
or fsspec) and makes its requests, `failures` says what went wrong in words of this package,
`background` runs many requests at once. `objects` reads an object, `writing` writes one, `listing`
lists those of a bucket. This room imports storage and buffers.
"""
