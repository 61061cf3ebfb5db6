"""An in-memory server with the part of the Hugging Face Hub's protocol that `HfFileSystem` uses for small files."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>[a-z-]+)/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?$")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.*)$")


class Hub(ThreadingHTTPServer):
    """One repository, with its files by path.

    Attributes:
        files: The files.
        commits: The number of commits.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.commits = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def sha(self):
        return hashlib.sha1(str(self.commits).encode()).hexdigest()

    def entries(self, below=""):
        """Return the files below a folder, and the folders."""
        prefix = below + "/" if below else ""
        found = {}
        for path, content in self.files.items():
            if path.startswith(prefix):
                oid = hashlib.sha1(content).hexdigest()
                found[path] = {"type": "file", "oid": oid, "size": len(content), "path": path}
                parts = path.split("/")[:-1]
                for depth in range(1, len(parts) + 1):
                    folder = "/".join(parts[:depth])
                    if folder.startswith(prefix):
                        found[folder] = {"type": "directory", "oid": oid, "size": 0, "path": folder}
        return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args): ...

    def answer(self, body, code=200, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", self.server.sha)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urlsplit(unquote(self.path))
        hub = self.server
        if url.path == "/api/whoami-v2":
            return self.answer({"name": "me", "type": "user", "orgs": []})
        if found := RESOLVE.match(url.path):
            content = hub.files.get(found["path"])
            if content is None:
                return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        found = API.match(url.path)
        if found is None or found["repo"] != "me/digits":
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        if found["what"] == "tree":
            below = found["path"] or ""
            entries = hub.entries(below)
            if below and not entries:
                return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            if parse_qs(url.query).get("recursive", ["false"])[0].lower() != "true":
                depth = below.count("/") + 1 if below else 0
                entries = {path: entry for path, entry in entries.items() if path.count("/") == depth}
            return self.answer(list(entries.values()))
        if found["what"] == "refs":
            return self.answer({"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": hub.sha}]})
        return self.answer({"id": "me/digits", "sha": hub.sha, "private": False, "siblings": [], "tags": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = API.match(urlsplit(unquote(self.path)).path)
        hub = self.server
        if found is None or found["repo"] != "me/digits":
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        if found["what"] == "paths-info":
            form = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
            entries = hub.entries()
            return self.answer([entries[path] for path in form["paths"] if path in entries])
        if found["what"] == "preupload":
            files = json.loads(body)["files"]
            plan = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for one in files]
            return self.answer({"files": plan})
        if found["what"] == "commit":
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] in ("deletedFile", "deletedFolder"):
                    path = value["path"].rstrip("/")
                    for name in [name for name in hub.files if name == path or name.startswith(path + "/")]:
                        del hub.files[name]
            hub.commits += 1
            url = f"{hub.address}/me/digits/commit/{hub.sha}"
            return self.answer({"commitUrl": url, "commitOid": hub.sha, "pullRequestUrl": None})
        return self.answer({"error": "Not found"}, 404)
