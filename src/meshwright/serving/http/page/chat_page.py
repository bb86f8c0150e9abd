"""Chat page at `/`: a conversation with the model, in one file, which loads nothing from elsewhere.

Its policy allows exactly this style and this script, by their hashes, and connections to this server alone.
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files


def _resource(name: str) -> str:
    return (files("meshwright.serving.http.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def chat_page() -> str:
    """Return the HTML."""
    page = _resource("chat.html")
    return page.replace("/*STYLE*/", _resource("chat.css")).replace("/*SCRIPT*/", _resource("chat.js"))


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(_resource('chat.css'))}; script-src {_hash(_resource('chat.js'))}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
