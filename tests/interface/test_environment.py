"""Variables that the command line sets for libraries, and the user's precedence."""

import pytest

from meshwright.interface.process.environment import DEFAULTS, describe_defaults, set_defaults
from meshwright.verbs.main import main


def test_each_default_is_set_once_and_never_over_the_users_own() -> None:
    environ: dict[str, str] = {}
    set_defaults(environ)
    assert environ == {default.name: default.value for default in DEFAULTS}
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environ
    for variable in DEFAULTS:
        for name in (variable.name, *variable.others):
            mine = {name: "mine"}
            set_defaults(mine)
            assert mine.keys() == (environ.keys() - {variable.name}) | {name}
            assert mine[name] == "mine" and (name == variable.name or variable.name not in mine)


def test_an_empty_value_leaves_the_librarys_own() -> None:
    environ = dict.fromkeys((default.name for default in DEFAULTS), "")
    set_defaults(environ)
    assert not environ
    assert all(line.endswith("=: the library's own") for line in describe_defaults(environ))


def test_debug_shows_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert main(["--debug", "init"]) == 0
    errors = capsys.readouterr().err
    assert "CUDA_MODULE_LOADING=LAZY: set by you" in errors
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True: GPU memory" in errors
    assert main(["init"]) == 0 and not capsys.readouterr().err
