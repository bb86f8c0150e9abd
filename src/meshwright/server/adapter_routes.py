"""Adapters that come and go while a server runs, by the routes that vLLM has for it.

A path leads into the folder that the server was given for adapters, and nowhere else. A file is read in a thread of its
own, so that answers go on; then the engine takes it between two steps. One at a time is loaded, within the limits.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.responses import JSONResponse

from meshwright.model.hub.adapter_config import CONFIG, WEIGHTS
from meshwright.serve.request_adapters import ServedAdapter
from meshwright.serve.serving_engine import ServingEngine
from meshwright.server.api_error import ApiError, refused
from meshwright.server.checked_fields import CheckedFields, checked_fields
from meshwright.server.hosted_model import HostedModel
from meshwright.server.routes import Call, Service
from meshwright.server.server_options import ServerLimits
from meshwright.spec.errors import MeshwrightError, RunError

Name = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
MOST_CONFIG_BYTES = 2**20


class LoadFields(CheckedFields):
    """Which adapter is loaded."""

    lora_name: Name
    """What requests will say."""
    lora_path: str = Field(min_length=1, max_length=4096)
    """Its folder: below the server's folder of adapters, or the whole path of one that lies there."""


class UnloadFields(CheckedFields):
    """Which adapter is unloaded."""

    lora_name: Name


async def load_adapter(call: Call) -> JSONResponse:
    """`POST /v1/load_lora_adapter`."""
    service, fields = call.service, checked_fields(LoadFields, await call.body())
    folder, hosted = _allowed(service), service.hosted()
    async with service.loading:
        if fields.lora_name in service.names:
            raise refused(f"{fields.lora_name} is here already: unload it first", "lora_name", "adapter_exists")
        _check_room(service)
        adapter = await asyncio.to_thread(_opened, hosted, folder, fields, service.limits)
        await _changed(service, lambda engine: engine.adapters.load(fields.lora_name, adapter))
    return JSONResponse({"id": fields.lora_name, "object": "model", "parent": hosted.name, "loaded": True})


async def unload_adapter(call: Call) -> JSONResponse:
    """`POST /v1/unload_lora_adapter`: its requests in flight go on to their end."""
    service, fields = call.service, checked_fields(UnloadFields, await call.body())
    _allowed(service)
    hosted = service.hosted(fields.lora_name)
    if fields.lora_name == hosted.name:
        raise refused(f"{hosted.name} is the model itself: name an adapter", "lora_name")
    async with service.loading:
        await _changed(service, lambda engine: engine.adapters.unload(fields.lora_name))
    return JSONResponse({"id": fields.lora_name, "object": "model", "parent": hosted.name, "loaded": False})


def _allowed(service: Service) -> Path:
    """The folder of adapters. ApiError where the server was started without one."""
    if service.adapter_folder is None:
        raise ApiError(
            403, "this server loads and unloads no adapters: start it with --adapter-dir DIR", code="adapters_are_fixed"
        )
    return service.adapter_folder


def _check_room(service: Service) -> None:
    engine, most = service.engine.engine, service.limits.max_adapters
    if engine is not None and engine.adapters.held >= most:
        raise ApiError(
            409, f"{most} adapters take memory already: unload one, and wait for its requests", code="too_many_adapters"
        )


def _inside(folder: Path, given: str, limits: ServerLimits) -> Path:
    """The adapter's own folder. ApiError where the path, or a link, leads out of the server's folder of adapters, or to
    no adapter, or to one that is too large."""
    root = folder.resolve()
    place = (root / given).resolve()
    files = {place / CONFIG: MOST_CONFIG_BYTES, place / WEIGHTS: limits.max_adapter_bytes}
    if not all(one.resolve().is_relative_to(root) for one in (place, *files)):
        raise ApiError(
            403, "lora_path leads out of the folder of adapters", code="outside_adapter_dir", param="lora_path"
        )
    if not all(one.is_file() for one in files):
        raise refused(f"lora_path is no folder with {CONFIG} and {WEIGHTS}", "lora_path", "no_adapter")
    for one, most in files.items():
        if one.stat().st_size > most:
            raise refused(f"{one.name} is larger than {most:,} bytes", "lora_path", "adapter_too_large")
    return place


def _opened(hosted: HostedModel, folder: Path, fields: LoadFields, limits: ServerLimits) -> ServedAdapter:
    """In a thread. ApiError where it is damaged, for another model, or cannot be served."""
    if hosted.open_adapter is None:
        raise refused("this model was opened without its folder, and takes no more adapters")
    try:
        place = _inside(folder, fields.lora_path, limits)
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, a character that no path has
        raise refused("lora_path is no path of this machine", "lora_path", "no_adapter") from None
    try:
        adapter = hosted.open_adapter(place, int(limits.max_adapter_rank))
        adapter.check(fields.lora_name, hosted.model)
    except MeshwrightError as error:
        raise refused(str(error).replace(str(place), fields.lora_path), "lora_path", "no_adapter") from None
    except OSError:  # of another owner, or gone meanwhile
        raise refused("lora_path cannot be read", "lora_path", "no_adapter") from None
    return adapter


async def _changed(service: Service, apply: Callable[[ServingEngine], None]) -> None:
    """Let the engine do it. ApiError."""
    try:
        await service.engine.change(apply)
    except RunError as error:
        raise ApiError(503, str(error), code="engine_failed", retry_seconds=30) from None
    except MeshwrightError as error:
        raise refused(str(error), "lora_name") from None
