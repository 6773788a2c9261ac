"""Sessions with servers of S3, for s3fs: every answer is read up to a bound."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
from botocore.httpsession import HTTPClientError  # type: ignore[import-untyped]

from tensordict.io.remote.web import AnswerError, BoundedResponse, read_at_most

_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


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


async def look_up(files: Any, path: str) -> dict[str, Any]:
    """Describe an object, in one request. s3fs would also list the folder of this name.

    Args:
        files: the file system of s3fs.
        path: of the object.

    Raises:
        FileNotFoundError: the object is missing.
    """
    found = await files._call_s3("head_object", **_arguments(files, path))
    return {**found, "type": "file", "size": found["ContentLength"]}


async def read_ends(files: Any, path: str, first: int, last: int) -> list[tuple[bytes, dict[str, Any]]]:
    """Read the first bytes of an object, unless they are 0, and its last bytes, at once; see `read_range`."""
    asked = {f"0-{first - 1}": first, f"-{last}": last} if first else {f"-{last}": last}
    calls = [read_range(files, path, *each) for each in asked.items()]
    # After an error, too, no request goes on in the background.
    found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


async def read_range(files: Any, path: str, byte_range: str, limit: int) -> tuple[bytes, dict[str, Any]]:
    """Read a range of an object, and one byte behind it where the server sends more than was asked for.

    s3fs itself reads the content of an object to its end.

    Args:
        files: the file system of s3fs.
        path: of the object.
        byte_range: "FIRST-LAST", or "-COUNT" for the last bytes.
        limit: the number of bytes of the range.

    Returns:
        the content, and the description of the object, as of `look_up`; its size is `None` if the server does not say.
    """
    answer = await files._call_s3("get_object", **_arguments(files, path), Range=f"bytes={byte_range}")
    body = answer["Body"]
    try:
        content = await read_at_most(body.read, limit + 1)
    finally:
        body.close()
    said = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    # A server that knows no ranges sends the whole object.
    size = answer.get("ContentLength") if "ContentRange" not in answer else int(said[1]) if said is not None else None
    return content, {**answer, "type": "file", "size": size}


def _arguments(files: Any, path: str) -> dict[str, str]:
    bucket, key, version = files.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
