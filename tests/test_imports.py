"""What may import what, what needs torch, and the public names."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest

import gradlens
from gradlens import curvature, instruments, landscape, quantities, reductions, signals, sinks
from gradlens.history.history import History

ROOT = Path(__file__).parent.parent

BELOW = {
    "gradlens._version": (),
    "gradlens.spelling": (),
    "gradlens.messages": (),
    "gradlens.history": ("gradlens.messages", "gradlens.spelling"),
    "gradlens.sinks": ("gradlens.history",),
    "gradlens.stateful": (),
    "gradlens.torch_private": (),
    "gradlens.schedules": ("gradlens.spelling", "gradlens.stateful"),
    "gradlens.numerics": ("gradlens.history", "gradlens.stateful", "gradlens.torch_private"),
    "gradlens.graph": ("gradlens.numerics",),
    "gradlens.operators": ("gradlens.graph", "gradlens.numerics"),
    "gradlens.reductions": ("gradlens.operators",),
    "gradlens.samples": ("gradlens.graph",),
    "gradlens.gradients": ("gradlens.samples", "gradlens.reductions"),
    "gradlens.signals": ("gradlens.graph",),
    "gradlens.backpack_adapter": ("gradlens.gradients",),
    "gradlens.parts": ("gradlens.gradients",),
    "gradlens.recorders": ("gradlens.signals",),
    "gradlens.curvature": ("gradlens.backpack_adapter", "gradlens.parts"),
    "gradlens.quantities": ("gradlens.curvature", "gradlens.signals", "gradlens.schedules"),
    "gradlens.compat.cockpit_log": ("gradlens.history",),
    "gradlens.plotting.loading": ("gradlens.compat.cockpit_log",),
    "gradlens.diagnosis": ("gradlens.plotting.loading",),
    "gradlens.observers": ("gradlens.quantities", "gradlens.diagnosis"),
    "gradlens.facts": ("gradlens.observers",),
    "gradlens.cockpit": ("gradlens.facts", "gradlens.parts", "gradlens.sinks"),
    "gradlens.compat.taiyi": ("gradlens.quantities",),
    "gradlens.instruments": ("gradlens.history",),
    "gradlens.plotting": ("gradlens.instruments", "gradlens.diagnosis"),
    "gradlens.landscape": ("gradlens.curvature", "gradlens.plotting", "gradlens.signals"),
    "gradlens.coordinates": ("gradlens.curvature", "gradlens.instruments", "gradlens.recorders"),
    "gradlens.integrations": ("gradlens.cockpit", "gradlens.plotting"),
    "gradlens.compat.cockpit": ("gradlens._version", "gradlens.cockpit", "gradlens.plotting"),
    "gradlens.report": ("gradlens.plotting",),
    "gradlens.cli": (
        "gradlens._version",
        "gradlens.cockpit",
        "gradlens.diagnosis",
        "gradlens.report",
    ),
    "gradlens": (
        "gradlens.cli",
        "gradlens.compat.cockpit",
        "gradlens.compat.taiyi",
        "gradlens.coordinates",
        "gradlens.diagnosis",
        "gradlens.integrations",
        "gradlens.landscape",
        "gradlens.recorders",
    ),
}
"""The packages from the bottom up, each with those directly below it.

A module may import modules of its own package and of all packages further down. It belongs to the
package with the longest name that its own name starts with.
"""

WITHOUT_TORCH = (
    "gradlens",
    "gradlens.history.*",
    "gradlens.sinks.*",
    "gradlens.compat.cockpit_log",
    "gradlens.diagnosis.*",
    "gradlens.instruments.*",
    "gradlens.plotting.*",
    "gradlens.report.*",
    "gradlens.cli.main",
    "gradlens.cli.commands",
)
"""Modules that load neither torch nor BackPACK."""

COMMANDS = """
import sys
from gradlens.cli.main import main
sys.exit(sum(main([command, sys.argv[1]]) for command in sys.argv[2:]))
"""

SLOW_TO_LOAD = {"torch", "backpack", "scipy", "matplotlib", "numpy"}


def modules() -> dict[str, Path]:
    """The files of all modules of the package, by name."""
    files = sorted((ROOT / "gradlens").rglob("*.py"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


MODULES = modules()


def imports(tree: ast.Module) -> Iterator[str]:
    """Names that a module imports anywhere: at the top, for types only, and in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: use an absolute import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is, or that it is in."""
    return next((one for one in (name, name.rpartition(".")[0]) if one in MODULES), None)


@cache
def imported_modules() -> dict[str, set[str]]:
    """For each module those of ours that it imports."""
    trees = {name: ast.parse(file.read_text("utf-8")) for name, file in MODULES.items()}
    found = {name: {module_of(one) for one in imports(tree)} for name, tree in trees.items()}
    return {name: {one for one in names if one is not None} for name, names in found.items()}


def package_of(module: str) -> str:
    return max((one for one in BELOW if f"{module}.".startswith(f"{one}.")), key=len)


def all_below(package: str) -> set[str]:
    return {package}.union(*map(all_below, BELOW[package]))


# What may import what ---------------------------------------------------------------------------


def test_packages_are_listed_from_the_bottom_up() -> None:
    names = [*BELOW]
    for place, (package, below) in enumerate(BELOW.items()):
        assert package in {package_of(module) for module in MODULES}, f"{package} has no modules"
        assert set(below) <= set(names[:place]), package


@pytest.mark.slow  # all modules are parsed
@pytest.mark.parametrize("package", BELOW)
def test_no_import_upwards(package: str) -> None:
    allowed = all_below(package)
    upwards = [
        f"{module} imports {imported}"
        for module in MODULES
        if package_of(module) == package
        for imported in sorted(imported_modules()[module])
        if package_of(imported) not in allowed
    ]
    assert not upwards


@pytest.mark.slow
def test_no_circles() -> None:
    try:
        TopologicalSorter(imported_modules()).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


# What needs torch -------------------------------------------------------------------------------


def loaded(*arguments: str) -> set[str]:
    """The libraries that an interpreter with these arguments imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^import time:.*\| +(\S+)$", result.stderr, flags=re.MULTILINE)
    return {line.partition(".")[0] for line in lines}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    history = History()
    for step in range(3):
        history.append(step, {"train_loss": 1.0 / (step + 1)})
    path = tmp_path / "run.jsonl"
    history.write(path)
    return path


@pytest.mark.slow
def test_modules_and_commands_that_need_no_torch(run: Path) -> None:
    patterns = [p for p in WITHOUT_TORCH if find_spec("bokeh") or "report" not in p]
    names = [name for pattern in patterns for name in fnmatch.filter(MODULES, pattern)]
    commands = ["plot", "summary", "diagnose", *(["report"] if find_spec("bokeh") else [])]
    found = loaded("-c", f"import {', '.join(names)}\n{COMMANDS}", str(run), *commands)
    assert {"gradlens", "matplotlib"} <= found
    assert not found & {"torch", "backpack"}


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_line_says_what_it_is_at_once(option: str) -> None:
    found = loaded("-m", "gradlens", option)
    assert "gradlens" in found
    assert not found & SLOW_TO_LOAD


# Public names -----------------------------------------------------------------------------------


def documented() -> set[str]:
    """The names of the table at the top of the API's page."""
    table = (ROOT / "docs" / "api.rst").read_text("utf-8").partition("Tracking\n---")[0]
    return set(re.findall(r"`gradlens\.(\w+)`", table))


def test_public_names_are_those_of_the_documentation() -> None:
    assert dir(gradlens) == sorted(gradlens.__all__)
    for module in (curvature, instruments, landscape, quantities, reductions, signals, sinks):
        assert dir(module) == sorted(module.__all__)
        assert not any(isinstance(getattr(module, name), ModuleType) for name in module.__all__)
    assert set(gradlens.__all__) == documented()


@pytest.mark.parametrize("name", gradlens.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(gradlens, name) is not None


def test_types_of_public_names_are_those_at_run_time() -> None:
    """Type checkers read the imports under TYPE_CHECKING, Python the table of modules."""
    tree = ast.parse(MODULES["gradlens"].read_text("utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = [*imports(ast.Module(typed.body, []))]
    assert {name.rpartition(".")[2] for name in names} == {*gradlens.__all__} - {"__version__"}
    for module, _, name in (name.rpartition(".") for name in names):
        assert getattr(gradlens, name) is getattr(import_module(module), name)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'gradlens' has no attribute 'coockpit'"):
        gradlens.coockpit  # noqa: B018
    assert not hasattr(gradlens, "_DEFINED")


def test_reductions_are_all_public() -> None:
    found = {n for n, one in vars(reductions).items() if _is_reduction(one) and n[0] != "_"}
    assert {*reductions.__all__} - {"ParameterGradients"} == found


def test_methods_of_curvature_are_all_documented() -> None:
    page = (ROOT / "docs" / "curvature.rst").read_text("utf-8")
    page += (ROOT / "docs" / "own-quantity.rst").read_text("utf-8")
    assert {*curvature.__all__} == set(re.findall(r"gradlens\.curvature\.(\w+)", page))


def _is_reduction(value: object) -> bool:
    return (
        isinstance(value, type)
        and get_origin(value) is None
        and issubclass(value, reductions.Reduction)
    )
