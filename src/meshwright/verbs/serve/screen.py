"""Settings that `serve` prints when it is ready: those that a user may want to change, or all."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.interface.terminal.screen_text import width, wrapped
from meshwright.spec.units import short_gib

if TYPE_CHECKING:
    from meshwright.serving.http.http_server import HttpServer

WIDEST = 100
"""Columns of these lines at most."""
LEAD = "  {:<10}"


def in_short(server: "HttpServer", settings: Mapping[str, Any], sampling: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each thing that a user may want to change, with its option.

    `settings`: those of `configuration`. `sampling`: defaults of the model for requests that give none.
    """
    engine = server.engine
    if engine is not None:
        options, weight = engine.options, engine.model.embed.weight
        cache = f"{short_gib(engine.cache.bytes)} for {engine.cache.number * engine.cache.size:,} tokens (--cache-mib)"
        ranks = "".join(f", {axis}={settings[axis]}" for axis in ("tp", "ep") if settings[axis] > 1)
        dtype = str(weight.dtype).removeprefix("torch.")
        yield from _row("model", f"{dtype} on {weight.device.type}{ranks} (--dtype)")
        yield from _row("context", f"{engine.longest:,} tokens of prompt and answer at most (--longest)")
        yield from _row("cache", cache)
        yield from _row(
            "at once",
            f"{options.most_sequences} answers (--most-sequences), {options.most_tokens:,} tokens a step "
            f"(--most-tokens); {settings['max_queue']} more prompts wait (--max-queue)",
        )
        if weight.device.type != "cpu":
            yield from _row("attention", str(engine.attention))
            yield from _row("graphs", f"{engine.cuda_graphs} (--cuda-graphs)")
    keys, host = settings["keys"], server.options.host
    access = f"{keys} keys" if keys > 1 else "1 key" if keys else f"no key: whoever reaches {host} may ask"
    yield from _row("access", f"{access} (--api-key-file)")
    if settings["adapters"] != "none":
        yield from _row("adapters", settings["adapters"].replace(",", ", "))
    if settings["guess_tokens"]:
        how = f"by {settings['draft']}" if "draft" in settings else "by look-up in the text"
        yield from _row("guesses", f"{settings['guess_tokens']} tokens {how} (--guess-tokens)")
    if sampling:
        values = " ".join(f"{name}={value}" for name, value in sampling.items())
        yield from _row("sampling", f"{values}, where a request gives none (--no-generation-config)")
    yield from _row("more", "--verbose lists all settings, --help all options")


def in_full(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield all settings as NAME=VALUE."""
    yield from _row("settings", " ".join(f"{name}={value}" for name, value in settings.items()))


def _row(name: str, text: str) -> Iterator[str]:
    yield from wrapped(text, min(WIDEST, width()), LEAD.format(name))
