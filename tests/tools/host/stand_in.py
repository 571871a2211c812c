"""A runner in a few lines, without any package, for tests of the host alone. It does what the prompt's first word says.

`say TEXT` streams TEXT letter by letter, `hold` one line and then spaces until the client goes, `oom` fails for want
of memory, `deaf` makes every later status fail, anything else is refused. What happens is told on stdout.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STAND_IN = (sys.executable, "-I", "-S", __file__)
"""The command that starts it."""
FINAL = {"Done": True, "PromptEvalCount": 2, "PromptEvalDuration": 5, "EvalCount": 3, "EvalDuration": 7}


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    deaf = False

    def do_GET(self) -> None:
        tell(f"GET {self.path}")
        status = {"Status": 0, "Progress": 100, "ContextLength": 8192, "Memory": 1000 + len(sys.argv)}
        self.answer(404 if self.path != "/v1/status" else 500 if Handler.deaf else 200, json.dumps(status))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/v1/tokenize":
            return self.answer(200, json.dumps(list(body.encode())))
        request = {key.lower(): value for key, value in json.loads(body).items()}
        tell(f"POST {json.dumps(request)}")
        word, _, rest = str(request["prompt"]).partition(" ")
        if word == "oom":
            return self.answer(500, "allocation failed: Out Of Memory")
        if word not in ("say", "hold", "deaf"):
            return self.answer(400, "what?")
        Handler.deaf = Handler.deaf or word == "deaf"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for letter in rest:
                self.line(
                    {"Content": letter, **({"EvalCount": 1} if request.get("includeintermediatemetrics") else {})}
                )
            while word == "hold":
                self.line({"Content": " "})
                time.sleep(0.005)
            self.line(FINAL)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            tell(f"gone {rest}")
            self.close_connection = True

    def line(self, value: object) -> None:
        data = json.dumps(value).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if text := os.environ.get("STAND_IN_FAILS"):
        os.write(2, f"Error: {text}\n".encode())
        sys.exit(1)
    if seconds := os.environ.get("STAND_IN_SLEEPS"):
        tell("loading")
        time.sleep(float(seconds))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
