"""A stand-in of the Hub of Hugging Face on this machine: repositories of data sets in memory.

It has the part of the HTTP API that `huggingface_hub` uses to make a repository, to commit files, and to fetch them.
Files of JSON are sent in the commit, and others as large files (LFS), as the real Hub asks for binary ones.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_sample"


class Hub:
    """The repositories: files by name for each commit, the newest last; and the large files by their hashes."""

    def __init__(self) -> None:
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []

    def sha(self, repo: str, number: int = -1) -> str:
        number %= len(self.commits[repo])
        return hashlib.sha1(f"{repo}{number}".encode()).hexdigest()

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        for number in range(len(self.commits[repo])):
            if revision == self.sha(repo, number):
                return revision, self.commits[repo][number]
        return self.sha(repo), self.commits[repo][-1]


@contextlib.contextmanager
def serve() -> Iterator[tuple[str, Hub]]:
    """Serve an empty hub during a block. Gives its endpoint and its content."""
    hub = Hub()

    class Handler(_Handler):
        content = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content: Hub

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, value: Any, status: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def _handle(self) -> None:
        hub, path = self.content, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        host = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not path.startswith("/large/"):
            return self._refuse(401, "GatedRepo")
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if repo in hub.commits:
                return self._answer({"url": f"{host}/datasets/{repo}", "error": "You already created this"}, 409)
            hub.commits[repo], hub.private[repo] = [{}], asked.get("private") or asked.get("visibility") == "private"
            return self._answer({"url": f"{host}/datasets/{repo}"})
        if found := re.fullmatch(r"/large/(\w+)", path):
            hub.large[found[1]] = body
            return self._answer(b"")
        if (
            not (found := re.match(r"/(?:api/)?datasets/(\w+/[\w-]+)(?:\.git)?(/.*)?", path))
            or found[1] not in hub.commits
        ):
            return self._refuse(404, "RepoNotFound")
        repo, rest = found[1], found[2] or ""
        if rest.startswith("/preupload/"):
            files = json.loads(body)["files"]
            modes = ["regular" if file["path"].endswith(".json") else "lfs" for file in files]
            return self._answer(
                {"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False} for f, m in zip(files, modes)]}
            )
        if rest.endswith("/info/lfs/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{host}/large/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        if rest.startswith("/commit/"):
            files = dict(hub.commits[repo][-1])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
            hub.commits[repo].append(files)
            sha = hub.sha(repo)
            return self._answer(
                {"success": True, "commitOid": sha, "commitUrl": f"{host}/datasets/{repo}/commit/{sha}"}
            )
        if found := re.fullmatch(r"/resolve/(\w+)/(.*)", rest):
            sha, files = hub.files(repo, found[1])
            if found[2] not in files:
                return self._refuse(404, "EntryNotFound")
            data = files[found[2]]
            return self._answer(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=sha)
        if found := re.fullmatch(r"(?:/revision/(\w+))?", rest):
            sha, files = hub.files(repo, found[1] or "main")
            return self._answer({"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in files]})
        if found := re.fullmatch(r"/tree/(\w+)(?:/.*)?", rest):
            _, files = hub.files(repo, found[1])
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._answer(rows)
        return self._refuse(404, "EntryNotFound")

    do_GET = do_POST = do_PUT = do_HEAD = _handle
