"""The drill's S3 server for tests: the libraries of this process, and of those it starts, are pointed to it."""

import pytest

from meshwright.verbs.drill.object_store import BUCKET, PASSING, Weather, serve, settings

__all__ = ["BUCKET", "PASSING", "Weather", "serve", "use"]


def use(patch: pytest.MonkeyPatch, address: str) -> None:
    """Point the libraries of this process, and of those it starts, to the server."""
    import s3fs

    # A client that was made before would still ask the server of another module.
    s3fs.S3FileSystem.clear_instance_cache()
    for name, setting in settings(address).items():
        patch.setenv(name, setting)
