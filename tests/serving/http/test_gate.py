"""Gate of every request: keys on all routes, hosts, origins, sizes of headers; and headers of answers."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from meshwright.serving.http.front.front import OPEN, application
from meshwright.serving.http.request.engine_link import ServerMetrics
from meshwright.serving.http.server_options import Keyring, ServerLimits, ServerOptions, read_keys
from meshwright.spec.errors import ArgumentError
from tests.serving.http.running import KEYS, NAME, Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as served:
        yield served


@pytest.fixture(scope="module")
def keyless() -> Iterator[Running]:
    with running(keys=()) as served:
        yield served


def every_route(server: Running) -> list[tuple[str, str]]:
    """Method and path of each route of the application."""
    service: Any = SimpleNamespace(metrics=ServerMetrics(NAME))
    gate: Any = application(service, server.server.options)
    assert isinstance(gate._app, Starlette)
    routes = [route for route in gate._app.routes if isinstance(route, Route)]
    assert len(routes) == len(gate._app.routes) >= 9
    methods = [(method, route.path) for route in routes for method in route.methods or ()]
    return [(method, path.replace("{name:path}", NAME)) for method, path in methods]


def test_an_unknown_path_lists_the_routes(server: Running) -> None:
    status, _, document = server.ask("/v1/completion")
    assert status == 404 and "POST /v1/completions, POST /v1/chat/completions" in str(document)
    status, _, document = server.ask("/v1/responses")
    assert status == 404 and "take /v1/chat/completions" in str(document)


def test_a_key_is_needed_on_every_route(server: Running) -> None:
    for method, path in every_route(server):
        body = b"{}" if method == "POST" else None
        for key in (None, "", "wrong", KEYS[0] + "x", KEYS[0][:-1]):
            status, headers, document = server.ask(path, body, key=key, method=method)
            if path in OPEN:
                assert status == 200
            elif method != "HEAD":
                assert (status, document["error"]["code"]) == (401, "invalid_api_key")
                assert headers["www-authenticate"] == "Bearer"
            else:
                assert status == 401
        assert server.ask(path, body, key=KEYS[1], method=method)[0] != 401
    assert server.ask("/not/there", key=None)[0] == 401 and server.ask("/not/there")[0] == 404
    assert server.ask("/v1/completions")[0] == 405


@pytest.mark.parametrize("header", ["Basic x", "Bearer", "bearer " + KEYS[0] + " x", KEYS[0]])
def test_other_forms_of_a_header(server: Running, header: str) -> None:
    assert server.ask("/v1/models", key=None, headers={"Authorization": header})[0] == 401


def test_two_headers_are_none(server: Running) -> None:
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", server.port)
    connection.putrequest("GET", "/v1/models")
    for key in KEYS:
        connection.putheader("Authorization", f"Bearer {key}")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_what_is_open_says_nothing_of_the_model(server: Running) -> None:
    for path in OPEN:
        content = server.ask(path, key=None)[2]
        assert NAME not in str(content)


def test_headers_of_answers(server: Running) -> None:
    for path in ("/", "/health", "/v1/models", "/nowhere"):
        headers = server.ask(path)[1]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "localhost:9", "Origin": "http://localhost:9"}, 200),
        ({"Host": "localhost:9", "Origin": "http://localhost:8"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(keyless: Running, headers: dict[str, str], status: int) -> None:
    assert keyless.ask("/v1/models", key=None, headers=headers)[0] == status


def test_a_key_is_enough_under_any_host(server: Running) -> None:
    assert server.ask("/v1/models", headers={"Host": "model.example"})[0] == 200
    assert server.ask("/v1/models", headers={"Origin": "http://evil.example"})[0] == 403


def test_many_headers(server: Running) -> None:
    many = {f"x-{number}": "1" for number in range(100)}
    status, _, document = server.ask("/v1/models", headers=many)
    assert (status, document["error"]["code"]) == (431, "too_many_headers")


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparison continues after a match, and always covers all bytes of a digest."""
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    right = hmac.compare_digest

    def compare(left: bytes, right_digest: bytes) -> bool:
        compared.append((left, right_digest))
        return right(left, right_digest)

    ring = Keyring(["a", "bb", "ccc"])
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for header, name in ((b"Bearer a", "key1"), (b"bearer ccc", "key3"), (b"Bearer d", None), (None, None)):
        compared.clear()
        tenant = ring.tenant(header)
        assert (tenant and tenant.name) == name
        assert len(compared) == 3 and all(len(left) == len(right_digest) == 32 for left, right_digest in compared)


def test_keys_share_no_prefix_in_the_cache() -> None:
    ring, again = Keyring(KEYS), Keyring(KEYS)
    salts = [keyring.tenant(f"Bearer {key}".encode()).salt for keyring in (ring, again) for key in KEYS]  # type: ignore[union-attr]
    assert len(set(salts)) == 4, "nor with those of another start"


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of Ann\nann-key\n\nbob-key\nann-key\n")
    assert read_keys(file) == ("ann-key", "bob-key")
    for text in ("", "# nothing\n", "with space\n", "h\u00e4\n"):
        file.write_text(text)
        with pytest.raises(ArgumentError):
            read_keys(file)
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_an_address_that_others_reach_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(ArgumentError, match="without_key=True"):
            ServerOptions(host=host)
        ServerOptions(host=host, keys=KEYS)
        ServerOptions(host=host, without_key=True)
    with pytest.raises(ArgumentError, match="port"):
        ServerOptions(port=70000)
    for name in ServerLimits.__slots__:
        with pytest.raises(ArgumentError, match=name):
            ServerLimits(**{name: -1})
