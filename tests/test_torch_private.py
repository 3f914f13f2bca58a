"""What gradlens takes private names of torch to mean; these tests fail where torch changes it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens import torch_private as private


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# Nodes ------------------------------------------------------------------------------------------


def test_saved_by_no_node() -> None:
    node = (leaf(3, 4) @ leaf(4, 2)).grad_fn
    assert private.saved(node, "alpha", 1) == 1
    with pytest.raises(AttributeError):
        private.saved(node, "alpha")


# Backward passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_pass_may_keep_the_graph(keeps: bool) -> None:
    output, found = leaf(3).exp(), list[bool]()
    output.register_hook(lambda _: found.append(private.keeps_graph()))
    output.sum().backward(retain_graph=keeps)
    assert found == [keeps]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_group_recomputes_a_checkpoint_once(grouped: bool) -> None:
    calls: list[int] = []

    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return x.exp(), y.sin()

    x, y = leaf(3), leaf(3)
    first, second = checkpoint(region, x, y, use_reentrant=False)
    with private.recomputing() if grouped else nullcontext():
        with private.recomputing() if grouped else nullcontext():
            torch.autograd.grad(first.sum(), x, retain_graph=True)
        torch.autograd.grad(second.sum(), y, retain_graph=True)
    assert len(calls) == (2 if grouped else 3)


# Tensors ----------------------------------------------------------------------------------------


def test_numbers() -> None:
    found: list[bool] = []

    def look(x: Tensor) -> Tensor:
        found.append(private.has_numbers(x))
        return x.sum()

    look(torch.ones(2, 3))
    look(torch.ones(3, device="meta"))
    with FakeTensorMode():
        look(torch.ones(3))
    assert found == [True, False, False]


# Modules ----------------------------------------------------------------------------------------


class Hook:
    """Counts its calls, of whatever kind."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_hooks_are_listed() -> None:
    module, hooks = nn.Linear(2, 2), [Hook() for _ in range(4)]
    module.register_forward_hook(hooks[0], with_kwargs=True)
    module.register_forward_pre_hook(hooks[1])
    module.register_full_backward_hook(hooks[2])
    assert private.forward_hooks(module) == [hooks[0]]
    assert private.forward_pre_hooks(module) == [hooks[1]]
    assert [*private.backward_hooks(module).values()] == [hooks[2]]
    module.register_forward_hook(hooks[3], prepend=True)
    assert private.forward_hooks(module) == [hooks[3], hooks[0]]


@pytest.mark.parametrize("options", [{}, {"with_kwargs": True}, {"always_call": True}])
def test_forward_hooks_can_be_removed_from_copies(options: dict[str, bool]) -> None:
    module, other = nn.Linear(2, 2), Hook()
    before = {
        name: list(value) for name, value in vars(copy.deepcopy(module)).items() if "hooks" in name
    }
    module.register_forward_hook(Hook(), **options)
    copied = copy.deepcopy(module)
    (hook,) = private.forward_hooks(copied)
    private.remove_forward_hook(copied, hook)
    copied(torch.ones(1, 2))
    assert hook.calls == 0
    assert {name: list(value) for name, value in vars(copied).items() if "hooks" in name} == before
    copied.register_forward_hook(other)
    private.remove_forward_hook(copied, hook)
    copied(torch.ones(1, 2))
    assert other.calls == 1


class LeftOut(Hook, private.UnscriptedHook):
    """As above, but scripting passes over it."""


def test_removing_a_hook_shows_no_other_one() -> None:
    module, hooks = nn.Linear(2, 2), [LeftOut(), LeftOut()]
    handles = [private.add_hook(module.register_forward_hook, hook) for hook in hooks]
    private.remove_hook(handles[0])
    assert [*module._forward_hooks.values()] == []
    assert private.forward_hooks(module) == hooks[1:]


def test_tables_may_be_replaced_by_a_tool() -> None:
    module, hook = nn.Linear(2, 2), LeftOut()
    handle = private.add_hook(module.register_forward_hook, hook)
    module._forward_hooks = {}  # type: ignore[assignment]
    private.remove_hook(handle)
    private.remove_forward_hook(module, hook)
    module(torch.ones(1, 2))
    assert hook.calls == 0


def test_parts_are_set_without_hooks_of_all_modules() -> None:
    calls: list[Any] = []
    model = nn.Sequential(nn.Linear(1, 1))
    handle = nn.modules.module.register_module_module_registration_hook(
        lambda *arguments: calls.append(arguments)
    )
    try:
        private.set_part(model, "0", nn.ReLU())
    finally:
        handle.remove()
    assert isinstance(model[0], nn.ReLU)
    assert not calls


# The package ------------------------------------------------------------------------------------

PACKAGE = Path(gradlens.__file__).parent
PRIVATE = ("torch_private.py", "fully_shard.py")
SOURCES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in PRIVATE]


def private_names_of_torch() -> set[str]:
    """Those of modules, tensors and nodes; of torch itself, nothing private is imported anyway."""
    node: Any = torch.addmm(leaf(2), leaf(3, 4), leaf(4, 2)).grad_fn
    objects: list[Any] = [nn.Linear(1, 1), torch.ones(1), node, node.next_functions[0][0], torch]
    return {name for each in objects for name in dir(each) if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package itself defines as functions, classes, attributes or fields."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_self(node.value) else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(tree: ast.Module, of_torch: set[str], own: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_self(node.value) and (node.attr in of_torch or node.attr not in own):
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(is_private(name) for name in names):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            if any(is_private(part) for a in node.names for part in a.name.split(".")):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            saved = node.value.startswith(("_saved", "_raw_saved"))
            yield from [repr(node.value)] if saved or node.value in of_torch else []


@pytest.mark.slow
def test_no_other_module_uses_private_names_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    of_torch, own = private_names_of_torch(), own_names([*trees.values()])
    found = {
        str(path.relative_to(PACKAGE)): uses
        for path, tree in trees.items()
        if (uses := [*private_uses(tree, of_torch, own)])
    }
    assert found == {}


def test_operations_on_lists_of_tensors() -> None:
    ones = [torch.tensor([3.0, -4.0]), torch.full((2, 3), 1e30), torch.zeros(0)]
    found = private.foreach("norm", ones, 2, torch.float64)
    assert [each.dtype for each in found] == [torch.float64] * 3
    torch.testing.assert_close(
        torch.stack(found),
        torch.tensor([5.0, 6**0.5 * 1e30, 0.0], dtype=torch.float64),
        rtol=1e-7,
        atol=0,
    )
    moved = [each.clone() for each in ones]
    private.foreach("copy_", moved, ones)
    private.foreach("add_", moved, [each + 1 for each in ones], alpha=0.5)
    assert all(
        torch.equal(one, each + 0.5 * (each + 1)) for one, each in zip(moved, ones, strict=True)
    )
    differences = private.foreach("sub", ones, [each + 1 for each in ones])
    for one, difference in zip(ones, differences, strict=True):
        torch.testing.assert_close(difference, one - (one + 1))
