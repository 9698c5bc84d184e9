"""Where bytes are: on this machine, at URLs, in stores. Objects are read by range, written whole.

`location` tells where a source or a target is, and opens it. `urls` recognises URLs and shows them
without secrets, `stores` selects the library for a URL (obstore or fsspec) and makes requests,
`failures` converts the libraries' errors, `background` runs many requests at once, `redirects`
keeps secrets from servers to which a redirect leads. `objects` reads an object, `transfers`
downloads a whole one, `cache` keeps downloaded archives on this machine, `writing` writes an
object, `listing` lists the objects of a bucket. This room imports storage, buffers and errors.
"""
