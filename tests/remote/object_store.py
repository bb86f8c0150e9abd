"""The drill's S3 server for tests: the libraries of this process, and of those it starts, are pointed to it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshwright.verbs.drill import object_store
from meshwright.verbs.drill.object_store import BUCKET, TRANSIENT, FaultyStore

__all__ = ["BUCKET", "TRANSIENT", "FaultyStore", "serve", "use"]


@contextmanager
def serve() -> Iterator[tuple[str, FaultyStore]]:
    """Start the server. Yields its address and the application that fails requests."""
    pytest.importorskip("moto.server")
    with object_store.serve() as served:
        yield served


def use(patch: pytest.MonkeyPatch, address: str) -> None:
    """Point the libraries of this process, and of those it starts, to the server."""
    import s3fs

    # A client that was made before would still ask the server of another module.
    s3fs.S3FileSystem.clear_instance_cache()
    for name, setting in object_store.client_environment(address).items():
        patch.setenv(name, setting)
