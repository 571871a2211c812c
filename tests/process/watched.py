"""A script that runs the runner and finally writes a JSON object about its start.

`before`, `ready` and `first` list the modules imported before the runner began, when it was ready (the first 200 on
/v1/status) and after the first requests. `collections` counts runs of the garbage collector until the runner was ready,
`frozen` counts the objects that it skips since, and `collecting` is true if it is enabled.
"""

import gc
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # not this folder: its modules are no top-level ones

_REQUESTS: tuple[dict[str, object], ...] = (
    {"Options": {"temperature": 0.0}},
    {"Options": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 3}},
    {"Options": {"temperature": 0.8, "stop": ["zz"]}, "Logprobs": True, "TopLogprobs": 2},
)


def _ask(port: int, head: str, body: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        fields = f"Host: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"{head} HTTP/1.1\r\n{fields}".encode() + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return answer


def _watch(port: int) -> None:
    try:
        os.write(1, json.dumps(_seen(port)).encode())
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _seen(port: int) -> dict[str, object]:
    loaded: dict[str, object] = {"before": sorted(sys.modules)}
    began = gc.get_stats()[0]["collections"]
    while True:
        try:
            _ask(port, "GET /v1/status")
            break
        except ConnectionError:
            time.sleep(0.005)
    collections = gc.get_stats()[0]["collections"] - began
    loaded["ready"] = sorted(sys.modules)
    for request in _REQUESTS:
        body = {"Prompt": "abc", **request}
        body["Options"] = {"num_predict": 4, **request["Options"]}  # type: ignore[dict-item]
        answer = _ask(port, "POST /completion", json.dumps(body).encode())
        assert b'"Done":true' in answer, answer
    loaded["first"] = sorted(sys.modules)
    state = {"collections": collections, "frozen": gc.get_freeze_count(), "collecting": gc.isenabled()}
    return {**loaded, **state}


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    watch = threading.Thread(target=_watch, args=(port,), daemon=True)
    watch.start()
    from runner.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
