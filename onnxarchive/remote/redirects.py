"""Refuses redirects of URLs whose query may have a secret, which another server would get.

The HTTP client of obstore follows redirects and sends the previous URL, with its query, in the
header `Referer`. No option prevents this.
"""

from __future__ import annotations

import errno
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

_SECRET = re.compile(
    r"(?:^|[?&])[^=&]*(?:sig|token|key|secret|password|auth)[^=&]*=", re.IGNORECASE
)
_TIMEOUT = 5  # seconds


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Returns None: urllib then raises `HTTPError` for the redirect."""


def require_no_redirect(store: Any, name: str) -> None:
    """Refuses a redirecting server if the query of a web address may have a secret.

    Args:
        store: The store of obstore for the address.
        name: The address for messages.

    Raises:
        OSError: The server redirects.
    """
    url = getattr(store, "url", None)
    if url is None or not _SECRET.search(urlsplit(url).query):
        return
    headers = (store.client_options or {}).get("default_headers", {})
    request = urllib.request.Request(url, headers={**headers, "Range": "bytes=0-0"})
    try:
        urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
    except (OSError, ValueError):
        return  # obstore's request will report the error
    else:
        return
    if status in (301, 302, 303, 307, 308):
        raise OSError(
            errno.EIO,
            "the server redirects, and the query of the URL, which may have a secret, would go to "
            "another URL; send the secret as a header (default_headers in storage_options)",
            name,
        )
