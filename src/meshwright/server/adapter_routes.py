"""Adapters that come and go while a server runs, by the routes that vLLM has for it (adapter_folder.py loads them)."""

from typing import Annotated

from pydantic import Field
from starlette.responses import JSONResponse

from meshwright.server.api_error import ApiError, refused
from meshwright.server.checked_fields import CheckedFields, checked_fields
from meshwright.server.routes import Call, Service

Name = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


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
    _check_allowed(service)
    card = service.card()
    async with service.loading:
        if fields.lora_name in service.names:
            raise refused(f"{fields.lora_name} is here already: unload it first", "lora_name", "adapter_exists")
        await service.engine.change(fields.lora_name, fields.lora_path)
    return JSONResponse({"id": fields.lora_name, "object": "model", "parent": card.name, "loaded": True})


async def unload_adapter(call: Call) -> JSONResponse:
    """`POST /v1/unload_lora_adapter`: its requests in flight go on to their end."""
    service, fields = call.service, checked_fields(UnloadFields, await call.body())
    _check_allowed(service)
    card = service.card(fields.lora_name)
    if fields.lora_name == card.name:
        raise refused(f"{card.name} is the model itself: name an adapter", "lora_name")
    async with service.loading:
        await service.engine.change(fields.lora_name, None)
    return JSONResponse({"id": fields.lora_name, "object": "model", "parent": card.name, "loaded": False})


def _check_allowed(service: Service) -> None:
    """ApiError where the server was started without a folder of adapters."""
    if not service.loads_adapters:
        raise ApiError(
            403, "this server loads and unloads no adapters: start it with --adapter-dir DIR", code="adapters_are_fixed"
        )
