"""A language-server client small enough to read: enough of the protocol to ask what an editor would ask."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

Message = dict[str, Any]

CAPABILITIES: Message = {
    "textDocument": {
        "hover": {"contentFormat": ["markdown", "plaintext"]},
        "completion": {"completionItem": {"documentationFormat": ["markdown"]}},
        "signatureHelp": {
            "signatureInformation": {"documentationFormat": ["markdown"], "activeParameterSupport": True},
        },
        "definition": {"linkSupport": False},
    },
    "workspace": {"configuration": True, "workspaceFolders": True},
}


class Server:
    """A running language server. Settings are what an editor's ``settings.json`` would say."""

    def __init__(self, command: list[str], root: Path, settings: Message) -> None:
        self.settings = settings
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
        )
        self.replies: queue.Queue[Message] = queue.Queue()
        self.asked = 0
        threading.Thread(target=self._read, daemon=True).start()
        folder = {"uri": root.as_uri(), "name": root.name}
        self.ask(
            "initialize",
            {
                "processId": None,
                "rootUri": root.as_uri(),
                "capabilities": CAPABILITIES,
                "workspaceFolders": [folder],
            },
        )
        self.tell("initialized", {})
        self.tell("workspace/didChangeConfiguration", {"settings": settings})

    def _send(self, message: Message) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout
        for message in messages(self.process.stdout):
            if "method" in message and "id" in message:  # the server asks us
                answer = None
                if message["method"] == "workspace/configuration":
                    answer = [self._section(item.get("section", "")) for item in message["params"]["items"]]
                self._send({"id": message["id"], "result": answer})
            elif "method" not in message:
                self.replies.put(message)

    def _section(self, name: str) -> Any:
        got: Any = self.settings
        for part in filter(None, name.split(".")):
            got = got.get(part, {})
        return got

    def tell(self, method: str, params: Any) -> None:
        """Send what wants no answer."""
        self._send({"method": method, "params": params})

    def ask(self, method: str, params: Any, seconds: float = 120) -> Any:
        """Send a question; its answer."""
        self.asked += 1
        self._send({"id": self.asked, "method": method, "params": params})
        end = time.monotonic() + seconds
        while True:
            message = self.replies.get(timeout=max(0.01, end - time.monotonic()))
            if message.get("id") == self.asked:
                assert "error" not in message, message
                return message["result"]

    def open(self, path: Path, text: str) -> Document:
        """Open a file with a text, which need not be what the disk has, if it has any."""
        item = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
        self.tell("textDocument/didOpen", {"textDocument": item})
        return Document(self, path.as_uri(), text)

    def close(self) -> None:
        """Hang up."""
        try:
            self.ask("shutdown", None, seconds=10)
            self.tell("exit", None)
            self.process.wait(5)
        except (OSError, AssertionError, queue.Empty, subprocess.TimeoutExpired):
            self.process.kill()


class Document:
    """An open file. A mark is a piece of its text that is there once; ``¦`` in it is the cursor."""

    def __init__(self, server: Server, uri: str, text: str) -> None:
        self.server, self.uri, self.text = server, uri, text

    def _ask(self, what: str, mark: str, **more: Any) -> Any:
        before, _, after = mark.partition("¦")
        assert self.text.count(before + after) == 1, (mark, self.text.count(before + after))
        head = self.text[: self.text.index(before + after) + len(before)]
        position = {"line": head.count("\n"), "character": len(head) - head.rfind("\n") - 1}
        return self.server.ask(
            f"textDocument/{what}", {"textDocument": {"uri": self.uri}, "position": position, **more}
        )

    def hover(self, mark: str) -> str:
        """What is shown when the mouse rests on the mark."""
        got = self._ask("hover", mark)
        return str(got["contents"]["value"]) if got else ""

    def completion(self, mark: str) -> set[str]:
        """What is offered at the mark."""
        got = self._ask("completion", mark, context={"triggerKind": 1})
        return {item["label"] for item in got["items"]} if got else set()

    def signature(self, mark: str) -> tuple[str, int]:
        """The signature that is shown in the middle of a call, and which parameter of it is lit."""
        got = self._ask("signatureHelp", mark, context={"triggerKind": 1, "isRetrigger": False})
        (one,) = got["signatures"]
        return one["label"], one.get("activeParameter", got.get("activeParameter"))

    def definition(self, mark: str) -> tuple[Path, int]:
        """The file and the line that a click lands on; there must be but one."""
        (one,) = self._ask("definition", mark)
        return Path(one["uri"].removeprefix("file://")), one["range"]["start"]["line"] + 1


def messages(stream: Any) -> Any:
    """The messages on a stream, each after its header, until it ends."""
    size = 0
    while line := stream.readline():
        if line.lower().startswith(b"content-length:"):
            size = int(line.split(b":")[1])
        if line == b"\r\n":
            yield json.loads(stream.read(size))
