"""An S3 server on loopback (moto) that fails on purpose: errors, slow answers, connections that break off."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.spec.extras import require

BUCKET = "bucket"
TRANSIENT = ("500 InternalError", "503 SlowDown")
"""Errors that another attempt may not meet: status and S3's code."""
FAULT_SHARE = 0.2
"""Share of the requests that fail in the modes `errors` and `torn`."""
SLOW_S = 0.3
"""Delay of each answer of a slow store."""


class FaultyStore:
    """WSGI application of a store that fails a share of the requests. Thread-safe enough to count.

    Args:
        application: The server's own WSGI application.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application, self.share, self.random = application, 0.0, random.Random(1)
        self.statuses = TRANSIENT
        self.torn_share = self.slow_s = 0.0
        """Share of the uploads whose connection breaks off halfway. Delay of each answer in seconds."""
        self.requests = self.failures = 0

    def set_mode(self, mode: str) -> None:
        """Choose a fault: `errors`, `slow` or `torn`. Empty = none."""
        self.share = FAULT_SHARE if mode == "errors" else 0.0
        self.torn_share = FAULT_SHARE if mode == "torn" else 0.0
        self.slow_s = SLOW_S if mode == "slow" else 0.0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request, or fail it."""
        self.requests += 1
        length = int(environ.get("CONTENT_LENGTH") or 0)
        time.sleep(self.slow_s)
        if self.torn_share and environ["REQUEST_METHOD"] == "PUT" and self.random.random() < self.torn_share:
            self.failures += 1
            environ["wsgi.input"].read(length // 2)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if self.random.random() < self.share:
            self.failures += 1
            # The body is read first: a client that still sends would see a broken pipe, which is another failure.
            environ["wsgi.input"].read(length)
            status = self.random.choice(self.statuses)
            start_response(status, [("Content-Type", "application/xml")])
            body = f"<Error><Code>{status.partition(' ')[2]}</Code><Message>failed on purpose</Message></Error>"
            return [body.encode()] if environ["REQUEST_METHOD"] != "HEAD" else []
        return self.application(environ, start_response)


@contextmanager
def serve() -> Iterator[tuple[str, FaultyStore]]:
    """Start an S3 server with an empty bucket. Yields its address and application. Raises PlanError without moto."""
    require("drill", "an object store on this machine")
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, *args: Any, **kwargs: Any) -> None:
            """Say nothing of each request."""

    faulty = FaultyStore(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    keys = client_environment(address)
    try:
        boto3.client(
            "s3", endpoint_url=address, region_name=keys["AWS_DEFAULT_REGION"],
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"], aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=BUCKET)  # fmt: skip
        yield address, faulty
    finally:
        server.shutdown()
        thread.join()


def client_environment(address: str) -> dict[str, str]:
    """Return the environment that points a process to the server, and away from its user's profiles."""
    return {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip
