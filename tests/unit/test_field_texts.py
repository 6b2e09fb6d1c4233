"""Every field of a configuration has a text, and `help()`, editors and the command line take it from one place."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import offbeat
import offbeat as ob
from offbeat.core.configuration import Configuration, Option, option, options


def configurations(root: Any = Configuration) -> Iterator[type[Any]]:
    for cls in root.__subclasses__():
        if cls.__module__.startswith("offbeat."):
            yield cls
        yield from configurations(cls)


def texts(cls: type[Any]) -> dict[str, str]:
    return {item.path: item.text for item in options(cls)}


def test_every_field_of_every_configuration_has_a_text() -> None:
    for package in ("strategies", "lab", "cluster", "topology", "core"):
        for module in pkgutil.walk_packages([f"{offbeat.__path__[0]}/{package}"], f"offbeat.{package}."):
            importlib.import_module(module.name)
    classes = {cls for cls in configurations() if is_dataclass(cls)}
    assert len(classes) > 80
    missing = [f"{cls.__qualname__}.{item.path}" for cls in classes for item in options(cls) if not item.text]
    assert not missing, "write a string below these fields that says what they are"


def test_help_shows_every_field_with_its_text() -> None:
    page = pydoc.plain(pydoc.render_doc(ob.AsyncTimed))
    for name, text in texts(ob.AsyncTimed).items():
        assert f"{name}: {text}" in page
    assert "Fields:" in (inspect.getdoc(ob.Cluster) or "")


def test_a_text_over_several_lines_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_of_mine.py").write_text(
        "from dataclasses import dataclass\nfrom offbeat.core.configuration import Configuration\n"
        "@dataclass(frozen=True)\nclass Mine(Configuration):\n"
        '    rate: float = 0.5\n    """how fast,\n    per second"""\n    none: int = 0\n'
        "    @dataclass(frozen=True)\n    class Inner(Configuration):\n"
        '        size: int = 1\n        """how large"""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("settings_of_mine")
    assert texts(module.Mine) == {"rate": "how fast, per second", "none": ""}
    assert texts(module.Mine.Inner) == {"size": "how large"}
    assert module.Mine.__doc__ == "Mine\n\nFields:\n    rate: how fast, per second\n    none: "


@dataclass(frozen=True)
class Base(Configuration):
    """Has a text."""

    batch: int = 1
    """samples per step"""


@dataclass(frozen=True)
class Changed(Base):
    batch: int = 2


def test_a_field_that_is_declared_anew_inherits_its_text() -> None:
    assert texts(Changed) == {"batch": "samples per step"}


def test_without_a_source_file_a_text_is_given_by_option() -> None:
    namespace: dict[str, Any] = {
        "__name__": "typed_at_a_prompt",
        "Base": Base,
        "option": option,
        "dataclass": dataclass,
    }
    text = "@dataclass(frozen=True)\nclass Typed(Base):\n    lr: float = option(0.1, 'learning rate')\n"
    exec(compile(text, "<prompt>", "exec", dont_inherit=True), namespace)
    typed = namespace["Typed"]
    assert typed().lr == 0.1
    assert [item.metadata.get("help") for item in typed.__dataclass_fields__.values()] == [None, "learning rate"]
    assert Option("lr", float, 0.1, typed).text == "learning rate"
    assert Option("batch", int, 1, typed).text == "samples per step"


def test_a_script_has_texts_and_importing_the_library_parses_no_source(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\nimport offbeat as ob\n"
        "from offbeat.core.configuration import field_texts\n"
        "@dataclass(frozen=True)\nclass Mine(ob.FixedMinibatch, name='mine'):\n"
        '    pause: float = 0.0\n    """seconds of rest"""\n'
        "print(field_texts.cache_info().misses)\nprint(Mine.__doc__)\n"
    )
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("0\nMine\n\nFields:\n")
    assert "    pause: seconds of rest" in printed
    assert "    batch: " in printed
