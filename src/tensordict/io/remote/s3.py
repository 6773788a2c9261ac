"""Sessions with servers of S3, for s3fs: every answer is read up to a bound."""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
from botocore.httpsession import HTTPClientError  # type: ignore[import-untyped]

from tensordict.io.remote.web import AnswerError, BoundedResponse, read_at_most


class _Answer(BoundedResponse):
    # A page of a listing has 1,000 keys of at most 1,024 bytes. XML may make each byte six.
    longest = 16 << 20


class Session(AIOHTTPSession):  # type: ignore[misc]
    """The session that s3fs uses where `config_kwargs` name it as `http_session_cls`."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        # aiobotocore makes the session and takes no class of answers.
        if not hasattr(session, "_response_class"):
            raise RuntimeError("this aiohttp has no place for a class of answers, so that no answer would be bounded")
        session._response_class = _Answer
        return session

    async def send(self, request: Any) -> Any:
        try:
            return await super().send(request)
        except HTTPClientError as error:
            # aiobotocore turns every unknown error into one of the connection, and s3fs tries these again.
            if isinstance(error.__context__, AnswerError):
                raise error.__context__ from None
            raise


async def read_from_s3(files: Any, path: str, byte_range: str, limit: int) -> bytes:
    """Read a range of an object, and one byte behind it where the server sends more than was asked for.

    s3fs itself reads the content of an object to its end.

    Args:
        files: the file system of s3fs.
        path: of the object.
        byte_range: "FIRST-LAST", or "-COUNT" for the last bytes.
        limit: the number of bytes of the range.
    """
    bucket, key, version = files.split_path(path)
    which = {"VersionId": version} if version else {}
    answer = await files._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={byte_range}", **which)
    body = answer["Body"]
    try:
        return await read_at_most(body.read, limit + 1)
    finally:
        body.close()
