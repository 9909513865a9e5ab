from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import inspect
import pkgutil
from types import ModuleType

import pytest

import pacedio

# The modules of design.md that users may import by name; any other begins with an underscore.
PUBLIC_MODULES = {
    *("exceptions", "pacing", "writer", "reader", "files", "aio", "copying", "archives", "handlers", "filesystem"),
    *("observe", "cli"),
}


def modules() -> list[ModuleType]:
    """Those whose names users import; of a command, users see what it prints."""
    names = [info.name for info in pkgutil.iter_modules(pacedio.__path__) if not info.name.startswith("_")]
    return [pacedio, *(importlib.import_module(f"pacedio.{name}") for name in names)]


def public_names(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in ("annotations", "TYPE_CHECKING")
    }


def own_definitions(module: ModuleType) -> dict[str, object]:
    """Public classes and functions that are written in the module."""
    return {
        f"{module.__name__}.{name}": value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }


def test_all_is_complete() -> None:
    assert len(pacedio.__all__) == len(set(pacedio.__all__))
    assert public_names(pacedio) <= set(pacedio.__all__)
    assert set(pacedio.__all__) <= set(dir(pacedio))


@pytest.mark.parametrize("name", pacedio.__all__)
def test_all_is_importable(name: str) -> None:
    assert getattr(pacedio, name) is not None


def test_star_import() -> None:
    namespace: dict[str, object] = {}
    exec("from pacedio import *", namespace)
    assert set(pacedio.__all__) <= set(namespace)


def test_modules_are_public_on_purpose() -> None:
    names = {info.name for info in pkgutil.iter_modules(pacedio.__path__) if not info.name.startswith("_")}
    assert names <= PUBLIC_MODULES


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_public_names_have_docstrings(module: ModuleType) -> None:
    assert module.__doc__
    definitions = own_definitions(module)
    for name, value in list(definitions.items()):
        if inspect.isclass(value):
            for member, attribute in vars(value).items():
                if not member.startswith("_") and (inspect.isfunction(attribute) or isinstance(attribute, property)):
                    # Looked up on the class, an override without one of its own finds that of io.
                    definitions[f"{name}.{member}"] = getattr(value, member)
    undocumented = [
        name
        for name, value in definitions.items()
        if not (value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value))
    ]
    assert undocumented == []


def test_types_are_shipped() -> None:
    assert importlib.resources.files("pacedio").joinpath("py.typed").is_file()


def test_commands_load() -> None:
    scripts = [
        entry for entry in importlib.metadata.distribution("pacedio").entry_points if entry.group == "console_scripts"
    ]
    assert {entry.name for entry in scripts} >= {"pacedcp"}
    assert all(callable(entry.load()) for entry in scripts)
