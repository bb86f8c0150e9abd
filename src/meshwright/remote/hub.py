"""Files of the Hugging Face Hub: `hf://buckets/ORG/NAME/FILE`, `hf://datasets/ORG/NAME/FILE`, `hf://ORG/MODEL/FILE`.

Each request that writes is a commit of a repository, or a batch of a bucket, and the Hub limits both. So files that
belong together are sent and removed together. A repository takes 128 commits an hour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.remote.locations import Location, RemoteFile, remote_file, reporting
from meshwright.spec.errors import StoreError
from meshwright.spec.units import many


@dataclass(frozen=True, slots=True)
class HubLocation(Location):
    """A file or a folder of a repository or a bucket."""

    def __post_init__(self) -> None:
        if not isinstance(self.filesystem.dircache, _NoListings):
            self.filesystem.dircache = _NoListings()
            import_module("huggingface_hub.utils").disable_progress_bars()

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.filesystem.endpoint, token=self.filesystem.token)

    def write(self, data: bytes) -> None:
        """Write a file at once: readers see all of it or nothing."""
        self.upload_all([(data, self)])

    def upload_all(self, files: Sequence[tuple[str | bytes, Location]]) -> None:
        """Copy (local path or contents, URL) to files of this repository or bucket, by one request."""

        def send() -> None:
            resolved = [(source, self.filesystem.resolve_path(target.path)) for source, target in files]
            root = resolved[0][1]
            if hasattr(root, "bucket_id"):
                self._api.batch_bucket_files(root.bucket_id, add=[(source, to.path) for source, to in resolved])
                return
            from huggingface_hub import CommitOperationAdd

            self._api.create_commit(
                root.repo_id, [CommitOperationAdd(to.path_in_repo, source) for source, to in resolved],
                commit_message=f"Upload {many(len(files), 'file')} with meshwright",
                repo_type=root.repo_type, revision=root.revision,
            )  # fmt: skip

        self._request(send)

    def download(self, target: Path, begun: Callable[[], None] = lambda: None) -> None:
        """Copy this file to a local path. `begun` is called after each piece that has come."""
        from fsspec.callbacks import TqdmCallback

        # With another callback the library requests each piece by itself, and the Hub counts requests.
        callback = TqdmCallback(tqdm_cls=partial(_Progress, begun))
        self._request(lambda: self.filesystem.get_file(self.path, str(target), callback=callback))

    def describe(self) -> RemoteFile | None:
        """Return the file's size and version. None = there is no such file."""
        try:
            entry = self._request(lambda: self.filesystem.info(self.path))
            if entry["type"] != "file":
                return None
            # Only with all that is known about the file comes its version.
            return remote_file(self.name, self._request(lambda: self.filesystem.info(self.path, expand_info=True)))
        except FileNotFoundError:
            return None

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files below this folder of a bucket, by one request."""
        if names:
            folder = self.filesystem.resolve_path(self.path)
            paths = [f"{folder.path}/{name}" for name in names]
            self._request(lambda: self._api.batch_bucket_files(folder.bucket_id, delete=paths))

    def refuse_unwritable(self, purpose: str) -> None:
        """Raise StoreError: no credentials, no repository or bucket, no right to write."""
        try:
            with reporting(self.url):
                root = self.filesystem.resolve_path(self.path)
                if not hasattr(root, "bucket_id"):  # a probe would be two commits
                    self._api.auth_check(root.repo_id, repo_type=root.repo_type, write=True)
                    return
        except FileNotFoundError:
            raise StoreError(
                f"{purpose}: {self} does not exist: create it, name another URL, or log in (`hf auth login`) if it is "
                "private"
            ) from None
        except StoreError as error:
            raise error.reworded(before=f"{purpose}: ") from None
        Location.refuse_unwritable(self, purpose)


class _NoListings(dict[str, Any]):
    """Cache of listings that is never used: other machines write, and the file system has no option against it."""

    def __contains__(self, key: object) -> bool:
        return False


class _Progress:
    """As much of tqdm's bar as a download asks for."""

    def __init__(self, begun: Callable[[], None], total: float | None = None) -> None:
        self.begun, self.total, self.n = begun, total, 0

    def update(self, size_bytes: float = 1) -> None:
        self.begun()

    def set_postfix_str(self, *words: object, **options: object) -> None:
        """Show no speed."""

    def refresh(self) -> None:
        """Draw nothing."""

    def close(self) -> None:
        """Draw nothing."""
