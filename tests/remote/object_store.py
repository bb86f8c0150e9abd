"""An S3 server on loopback, moto's, that may answer some requests with an error."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "bucket"
PASSING = ("500 InternalError", "503 SlowDown")
"""Errors that another attempt may not meet: status and S3's code."""


class Weather:
    """Fails a share of the requests with 500 or 503, or with the statuses that are set."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application, self.share, self.random = application, 0.0, random.Random(1)
        self.statuses = PASSING
        self.requests = self.failures = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.requests += 1
        if self.random.random() < self.share:
            self.failures += 1
            # The body is read first: a client that still sends would see a broken pipe, which is another failure.
            length = int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"].read(length)
            status = self.random.choice(self.statuses)
            start_response(status, [("Content-Type", "application/xml")])
            body = f"<Error><Code>{status.partition(' ')[2]}</Code><Message>bad weather</Message></Error>"
            return [body.encode()] if environ["REQUEST_METHOD"] != "HEAD" else []
        return self.application(environ, start_response)


@contextmanager
def serve() -> Iterator[tuple[str, Weather]]:
    """An S3 server with an empty bucket: its address, and its weather."""
    pytest.importorskip("moto.server")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, *args: Any, **kwargs: Any) -> None:
            """Say nothing of each request."""

    weather = Weather(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, weather, threaded=True, request_handler=Silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", weather
    finally:
        server.shutdown()
        thread.join()


def use(patch: pytest.MonkeyPatch, address: str) -> None:
    """Point the libraries of this process, and of those it starts, to the server."""
    import s3fs

    # A client that was made before would still ask the server of another module.
    s3fs.S3FileSystem.clear_instance_cache()
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Profiles of whoever runs the tests have no say.
    patch.setenv("AWS_CONFIG_FILE", "/dev/null")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")


def make_bucket(address: str) -> None:
    import boto3

    boto3.client("s3", endpoint_url=address).create_bucket(Bucket=BUCKET)
