"""Adapters that are loaded while a server runs, in the engine's process.

A path must lead into the server's folder of adapters. A file is read in a separate thread, so answers continue; then
the engine takes the adapter between two steps.
"""

import threading
import traceback
from pathlib import Path

from meshwright.formats.hub.adapter_config import CONFIG, WEIGHTS
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.api_error import ApiError, bad_request, internal_error
from meshwright.serving.http.channel.channel import Channel, FrameKind
from meshwright.serving.http.channel.engine_messages import AdapterCall, AdapterReply
from meshwright.serving.http.host.engine_thread import EngineThread
from meshwright.serving.http.server_options import ServerOptions
from meshwright.spec.errors import MeshwrightError, RunError

MOST_CONFIG_BYTES = 2**20


def answer_adapter_call(call: AdapterCall, thread: EngineThread, options: ServerOptions, channel: Channel) -> None:
    """Read the adapter in a thread, pass it to the engine, and reply. The HTTP process makes one call at a time."""
    threading.Thread(target=_answer_call, args=(call, thread, options, channel), daemon=True).start()


def _answer_call(call: AdapterCall, thread: EngineThread, options: ServerOptions, channel: Channel) -> None:
    adapter: ServedAdapter | None = None
    try:
        if call.path is not None:
            adapter = _open_adapter(call.name, call.path, thread, options)
    except Exception as error:
        if not isinstance(error, ApiError):
            traceback.print_exc()
            error = internal_error()
        channel.send(FrameKind.CHANGED, AdapterReply(call.call, _names(thread.engine), error).encode())
        return

    # Runs in the engine's thread. A RunError of a living engine is raised again, which ends that engine.
    def change(engine: ServingEngine | None) -> None:
        error: ApiError | None = None
        try:
            if engine is None:
                raise RunError("the engine has failed: restart the server, and see its log")
            if adapter is None:
                engine.adapters.unload(call.name)
            else:
                engine.adapters.load(call.name, adapter)
        except RunError as failure:
            error = ApiError(503, str(failure), code="engine_failed", retry_seconds=30)
            if engine is not None:
                raise
        except MeshwrightError as failure:
            error = bad_request(str(failure), "lora_name")
        except Exception:
            traceback.print_exc()
            error = internal_error()
        finally:
            channel.send(FrameKind.CHANGED, AdapterReply(call.call, _names(engine), error).encode())

    thread.put(change)


def _names(engine: ServingEngine | None) -> tuple[str, ...]:
    return () if engine is None else engine.adapters.names


def _open_adapter(name: str, path: str, thread: EngineThread, options: ServerOptions) -> ServedAdapter:
    """Open an adapter. Raises ApiError if it is damaged, of another model, unservable, or one too many."""
    hosted, engine, limits, root = thread.hosted, thread.engine, options.limits, options.adapter_folder
    assert hosted is not None and engine is not None and root is not None, "the HTTP process has refused this"
    if engine.adapters.held >= limits.max_adapters:
        raise ApiError(
            409,
            f"{limits.max_adapters} adapters take memory already: unload one, and wait for its requests",
            code="too_many_adapters",
        )
    if hosted.open_adapter is None:
        raise bad_request("this model was opened without its folder, and takes no more adapters")
    try:
        folder = _resolve_folder(root, path, limits.max_adapter_bytes)
    except (OSError, RuntimeError, ValueError):  # too long, a cycle of links, or an impossible character
        raise bad_request("lora_path is no path of this machine", "lora_path", "no_adapter") from None
    try:
        adapter = hosted.open_adapter(folder, int(limits.max_adapter_rank))
        adapter.check(name, hosted.model)
    except MeshwrightError as error:
        raise bad_request(str(error).replace(str(folder), path), "lora_path", "no_adapter") from None
    except OSError:  # another owner's file, or removed meanwhile
        raise bad_request("lora_path cannot be read", "lora_path", "no_adapter") from None
    return adapter


def _resolve_folder(root: Path, path: str, most_bytes: int) -> Path:
    """Return an adapter's folder. Raises ApiError outside the server's folder, without adapter, or too large."""
    root = root.resolve()
    folder = (root / path).resolve()
    files = {folder / CONFIG: MOST_CONFIG_BYTES, folder / WEIGHTS: most_bytes}
    if not all(file.resolve().is_relative_to(root) for file in (folder, *files)):
        raise ApiError(
            403, "lora_path leads out of the folder of adapters", code="outside_adapter_dir", param="lora_path"
        )
    if not all(file.is_file() for file in files):
        raise bad_request(f"lora_path is no folder with {CONFIG} and {WEIGHTS}", "lora_path", "no_adapter")
    for file, most in files.items():
        if file.stat().st_size > most:
            raise bad_request(f"{file.name} is larger than {most:,} bytes", "lora_path", "adapter_too_large")
    return folder
