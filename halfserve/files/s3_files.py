"""S3 through s3fs, without two abilities of a store: to redirect requests to another host, and to list without end.

Imported only if s3fs is needed, because it is an extra.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from aiobotocore.httpsession import AIOHTTPSession
from s3fs import S3FileSystem

REDIRECTS = {301, 302, 303, 307, 308}


class UnredirectedSession(AIOHTTPSession):  # type: ignore[misc]  # (it ships no types)
    """Sends requests without following redirects: aiohttp would follow them to any host, unlike the HTTP client of botocore.

    botocore itself handles an answer that names the bucket's region: it asks that region's own endpoint of AWS.
    """

    async def send(self, request: Any) -> Any:
        response = await super().send(request)
        headers = response.headers
        if response.status_code in REDIRECTS and "location" in headers and "x-amz-bucket-region" not in headers:
            response.raw.close()
            host = urlsplit(headers["location"]).netloc.rpartition("@")[2]
            raise OSError(
                f"the store redirects to {host or 'another path'}, and redirects are not followed; set the bucket's own region "
                "or endpoint (AWS_DEFAULT_REGION, AWS_ENDPOINT_URL)"
            )
        return response

    async def _get_session(self, *arguments: Any) -> Any:
        return _Unredirected(await super()._get_session(*arguments))


class _Unredirected:
    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, *arguments: Any, **options: Any) -> Any:
        return self._session.request(*arguments, **options, allow_redirects=False)


class S3Files(S3FileSystem):  # type: ignore[misc]  # (see above)
    """File system of an S3-compatible store."""

    @classmethod
    def opened(cls, url: str, options: dict[str, Any]) -> tuple[S3Files, str]:
        """Return the file system of an s3:// URL, and the path in it."""
        config = {"http_session_cls": UnredirectedSession, **options.get("config_kwargs", {})}
        settings: dict[str, Any] = cls._get_kwargs_from_urls(url) | options | {"config_kwargs": config}
        files = cls(**settings)
        files.retries = 1
        return files, str(cls._strip_protocol(url))

    async def _list_pages(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        seen = set()
        async for page in super()._list_pages(*arguments, **options):
            yield page
            token = page.get("NextContinuationToken")
            if token is not None and token in seen:
                raise OSError("the store repeats a part of its listing, which would never end; check the store")
            seen.add(token)
