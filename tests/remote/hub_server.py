"""A Hub on this machine, as far as huggingface_hub and hf_xet ask: repositories and buckets, read and written.

What a repository is sent becomes one commit per request, as on the Hub, and commits are counted. Files of buckets come
as hf_xet sends them: chunks in xorbs, and shards that say which chunks are a file (huggingface.co/docs/xet). hf_xet
itself puts them together again.
"""

import base64
import hashlib
import json
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_of_this_machine"
DATE = "2026-11-30T00:00:00.000Z"


Segment = tuple[str, int, int, int]
"""Part of a file in xet's store: xorb, size in bytes, first chunk, end of chunks."""


@dataclass
class Hub:
    """What the server holds and was asked for."""

    address: str = ""
    stores: dict[str, dict[str, bytes | str]] = field(default_factory=dict)
    """`buckets/ORG/NAME`, `models/ORG/NAME` or `datasets/ORG/NAME` -> path -> contents, or the hash of xet's file."""
    xorbs: dict[str, bytes] = field(default_factory=dict)
    xet_files: dict[str, list[Segment]] = field(default_factory=dict)
    commits: int = 0
    """Requests that changed a repository."""
    batches: int = 0
    """Requests that changed a bucket."""
    read_only: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def size_bytes(self, contents: bytes | str) -> int:
        return len(contents) if isinstance(contents, bytes) else sum(part[1] for part in self.xet_files[contents])

    def read(self, contents: bytes | str) -> bytes:
        if isinstance(contents, bytes):
            return contents
        import hf_xet

        with tempfile.NamedTemporaryFile() as file:
            with hf_xet.XetSession().new_file_download_group(
                endpoint=f"{self.address}/cas", token=TOKEN, token_expiry_unix_secs=2**40
            ) as group:
                group.start_download_file(hf_xet.XetFileInfo(contents, self.size_bytes(contents)), file.name)
            return Path(file.name).read_bytes()

    def add_shard(self, shard: bytes) -> None:
        """Take the files of a shard: after its header a header of each file, its segments, and what checks them."""
        at = 48
        while shard[at : at + 32] != b"\xff" * 32:
            flags, count = struct.unpack_from("<II", shard, at + 32)
            name, segments = _hex(shard[at : at + 32]), []
            for number in range(1, count + 1):
                entry = at + 48 * number
                _, size, first, end = struct.unpack_from("<IIII", shard, entry + 32)
                segments.append((_hex(shard[entry : entry + 32]), size, first, end))
            self.xet_files[name] = segments
            at += 48 * (1 + count * (2 if flags >> 31 else 1) + (flags >> 30 & 1))

    def reconstruct(self, name: str, span: tuple[int, int] | None) -> dict | None:
        """Say where the bytes of a file lie. None = the span begins after its end."""
        first, last = span or (0, 2**63)
        position, offset, terms, fetch = 0, None, [], {}
        for xorb, size, start, end in self.xet_files[name]:
            if position + size > first and position <= last:
                offset = first - position if offset is None else offset
                terms.append({"hash": xorb, "unpacked_length": size, "range": {"start": start, "end": end}})
                ends = _ends_of_chunks(self.xorbs[xorb])
                chunks, whole = {"start": 0, "end": len(ends) - 1}, {"start": 0, "end": ends[-1] - 1}
                fetch[xorb] = [{"range": chunks, "url": f"{self.address}/cas/xorb/{xorb}", "url_range": whole}]
            position += size
        if position <= first and position > 0:
            return None
        return {"offset_into_first_range": offset or 0, "terms": terms, "fetch_info": fetch}


def _hex(digest: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))


def _ends_of_chunks(xorb: bytes) -> list[int]:
    """Return where each chunk begins, and where the last one ends. A chunk's header has its packed size."""
    ends = [0]
    while ends[-1] < len(xorb) and xorb[ends[-1] : ends[-1] + 7] != b"XETBLOB":
        ends.append(ends[-1] + 8 + int.from_bytes(xorb[ends[-1] + 1 : ends[-1] + 4], "little"))
    return ends


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts, query = self._parts()
        if parts[0] == "cas":
            self._answer_cas(parts[1:])
        elif parts[0] != "api":
            self._resolve(parts)
        elif self._files(parts) is None:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        elif "auth-check" in parts and self.hub.read_only:
            self._answer(403, {"error": "this token may not write"})
        elif any("xet-" in part for part in parts):
            self._send_token()
        elif "tree" in parts:
            at = parts.index("tree") + (1 if parts[1] == "buckets" else 2)
            self._list(parts, "/".join(parts[at:]), "rue" in query.get("recursive", [""])[0])
        else:
            name, files = "/".join(parts[2:4]), self._files(parts) or {}
            sizes = sum(map(self.hub.size_bytes, files.values()))
            about = {"id": name, "private": True, "createdAt": DATE, "sha": "0" * 40, "size": sizes}
            self._answer(200, about | {"totalFiles": len(files)})

    def do_POST(self) -> None:
        parts, _ = self._parts()
        if parts[0] == "cas":
            self._answer_cas(parts[1:])
            return
        body, files = self._body(), self._files(parts)
        if files is None:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        elif parts[-1] == "paths-info" or "paths-info" in parts:
            asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            self._answer(200, [self._about(parts, path) for path in asked if path in files])
        elif "preupload" in parts:
            asked = [entry["path"] for entry in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in asked]
            self._answer(200, {"files": modes})
        elif self.hub.read_only:
            self._answer(403, {"error": "this token may not write"})
        else:
            self._change(files, [json.loads(line) for line in body.splitlines()], is_bucket=parts[1] == "buckets")

    def _change(self, files: dict[str, bytes | str], lines: list[dict], *, is_bucket: bool) -> None:
        with self.hub.lock:
            for line in lines:
                if line.get("type") == "addFile":
                    files[line["path"]] = line["xetHash"]
                elif line.get("type") == "deleteFile":
                    files.pop(line["path"], None)
                elif line.get("key") == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line.get("key") == "deletedFile":
                    files.pop(line["value"]["path"], None)
            self.hub.batches += is_bucket
            self.hub.commits += not is_bucket
        name = "/".join(self._parts()[0][1:4]).removeprefix("models/")
        url = {
            "commitUrl": f"{self.hub.address}/{name}/commit/0",
            "commitOid": "0" * 40,
            "hookOutput": "",
            "success": True,
        }
        self._answer(200, url)

    def _span(self) -> tuple[int, int] | None:
        """Return the first and the last byte that the request asks for."""
        if (span := self.headers.get("Range")) is None:
            return None
        first, _, last = span.removeprefix("bytes=").partition("-")
        return int(first), int(last or 2**63)

    def _answer_cas(self, parts: list[str]) -> None:
        """Answer hf_xet: GET of a file's parts and of a xorb's bytes, POST of xorbs and shards."""
        if self.command == "POST":
            body = self._body()
            with self.hub.lock:
                if "xorbs" in parts:
                    self.hub.xorbs[parts[-1]] = body
                    self._answer(200, {"was_inserted": True})
                elif parts[:2] == ["v1", "shards"]:
                    self.hub.add_shard(body)
                    self._answer(200, {"result": 1})
                else:
                    self._answer(404, {"error": "not in this version"})
        elif "xorb" in parts:
            self._send_span(self.hub.xorbs[parts[-1]], {})
        elif parts[:2] == ["v1", "reconstructions"]:
            where = self.hub.reconstruct(parts[-1], self._span())
            self._answer(416 if where is None else 200, where)
        else:
            self._answer(404, {"error": "not found"})

    def _parts(self) -> tuple[list[str], dict[str, list[str]]]:
        split = urlsplit(self.path)
        path = [part for piece in split.path.strip("/").split("/") for part in unquote(piece).split("/")]
        return path, parse_qs(split.query)

    def _files(self, parts: list[str]) -> dict[str, bytes | str] | None:
        return self.hub.stores.get("/".join(parts[1:4]))

    def _about(self, parts: list[str], path: str) -> dict:
        contents = (self._files(parts) or {})[path]
        about = {"type": "file", "path": path, "size": self.hub.size_bytes(contents)}
        if isinstance(contents, bytes):
            return about | {"oid": hashlib.sha1(contents).hexdigest()}
        return about | {"xetHash": contents, "mtime": DATE, "uploadedAt": DATE}

    def _list(self, parts: list[str], folder: str, is_deep: bool) -> None:
        below = f"{folder}/" if folder else ""
        paths = [path for path in self._files(parts) or {} if path.startswith(below) or path == folder]
        entries = [self._about(parts, path) for path in paths if is_deep or "/" not in path.removeprefix(below)]
        names = {path.removeprefix(below).split("/")[0] for path in paths if "/" in path.removeprefix(below)}
        folders = [{"type": "directory", "path": below + name, "oid": "0" * 40, "uploadedAt": DATE} for name in names]
        if not paths and folder and parts[1] != "buckets":
            self._answer(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
        else:
            self._answer(200, entries + (folders if not is_deep or parts[1] != "buckets" else []))

    def _resolve(self, parts: list[str]) -> None:
        parts = parts if parts[0] in ("buckets", "datasets") else ["models", *parts]
        at = parts.index("resolve") + (1 if parts[0] == "buckets" else 2)
        contents = self.hub.stores.get("/".join(parts[:3]), {}).get("/".join(parts[at:]))
        if contents is None:
            self._answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
            return
        data = self.hub.read(contents)
        self._send_span(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": "0" * 40})

    def _send_span(self, data: bytes, headers: dict[str, str]) -> None:
        if (span := self._span()) is None:
            self._send(200, data, headers)
            return
        first, last = span[0], min(span[1], len(data) - 1)
        self._send(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _body(self) -> bytes:
        """Read what was sent, with a length or in pieces."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send_token(self) -> None:
        expires = int(time.time()) + 3600
        url = f"{self.hub.address}/cas"
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": TOKEN, "X-Xet-Token-Expiration": str(expires)}
        self._answer(200, {"casUrl": url, "accessToken": TOKEN, "exp": expires}, headers)

    def _answer(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(document).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serve() -> Iterator[Hub]:
    """Start the server, with an empty bucket, model and dataset. Yields what it holds."""
    pytest.importorskip("huggingface_hub")
    hub = Hub()
    hub.stores |= {name: {} for name in ("buckets/org/runs", "models/org/model", "datasets/org/texts")}
    hub.stores["models/org/model"][".gitattributes"] = b"*.safetensors filter=lfs\n"
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    yield hub
    server.shutdown()
    server.server_close()


def use(patch: pytest.MonkeyPatch, hub: Hub, cache: Path) -> None:
    """Point the libraries of this process, and of those it starts, to the server."""
    from huggingface_hub import HfFileSystem, close_session, constants

    HfFileSystem.clear_instance_cache()
    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    patch.setattr(constants, "ENDPOINT", hub.address)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    settings = {"ENDPOINT": hub.address, "TOKEN": TOKEN, "HOME": str(cache), "HUB_OFFLINE": "0"}
    for name, setting in settings.items():
        patch.setenv(f"HF_{name}", setting)
    close_session()


if __name__ == "__main__":
    with serve() as hub:
        print(hub.address, flush=True)
        while True:
            time.sleep(5)
            print(hub.commits, hub.batches, {k: len(v) for k, v in hub.stores.items()}, flush=True)
