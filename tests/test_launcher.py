"""What `python -m kvsplice.lmcache` refuses. What it starts: tests/peers/test_launcher_lmcache.py."""

import importlib
import sys
from types import ModuleType

import pytest

from kvsplice.lmcache import launcher
from kvsplice.lmcache.launcher import main


@pytest.fixture
def lmcache(monkeypatch):
    """An LMCache of this version, with nothing in it."""
    module = ModuleType("lmcache")
    module.__spec__ = importlib.machinery.ModuleSpec("lmcache", None)
    module.__version__ = "0.5.2"
    monkeypatch.setitem(sys.modules, "lmcache", module)
    return module


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    monkeypatch.setattr(launcher.runpy, "run_module", lambda *_, **__: pytest.fail("a server was started"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the command has to be 'server'"),
        (["coordinator"], "the command has to be 'server'"),
        (["server", "--kvsplice", "{"], "--kvsplice: '{' is not JSON"),
        (["server", "--kvsplice"], "--kvsplice: '' is not JSON"),
        (["server", "--kvsplice=[]"], "--kvsplice: '[]' is no JSON object"),
        (["server", '--kvsplice={"capacity": -1}'], "--kvsplice: config: capacity is -1"),
        (["server", '--kvsplice={"size": 1}'], "--kvsplice: config: unknown key 'size'"),
    ],
)
def test_wrong_arguments(lmcache, capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.5.6", "this is LMCache 0.5.6: use lmcache server --server-module"),
        ("0.10.0", "this is LMCache 0.10.0: use lmcache server --server-module"),
        ("0.4.6", "this is LMCache 0.4.6: it is not known to kvsplice"),
        ("0.5.2.dev3", "this is LMCache 0.5.2.dev3: it is not known to kvsplice"),
    ],
)
def test_other_versions(lmcache, capsys, version, message):
    lmcache.__version__ = version
    assert main(["server"]) == 2
    assert message in capsys.readouterr().err


def test_no_lmcache(monkeypatch, capsys):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    assert main(["server"]) == 2
    assert "there is no LMCache in this environment" in capsys.readouterr().err


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "python -m kvsplice.lmcache server" in capsys.readouterr().out
