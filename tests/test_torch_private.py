"""What gradlens takes private names of torch to mean; these tests fail where torch changes it."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import BaseModelOutput

import gradlens
from gradlens import torch_private as private


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# Base classes and containers --------------------------------------------------------------------

KINDS: dict[Any, tuple[list[type[nn.Module]], list[type[nn.Module]]]] = {
    private.LossModule: ([nn.CrossEntropyLoss, nn.MSELoss, nn.CTCLoss], [nn.Linear, nn.Softmax]),
    private.BatchNorm: (
        [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm],
        [nn.InstanceNorm1d, nn.GroupNorm, nn.LayerNorm],
    ),
    private.ChannelNorm: (
        [nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm3d],
        [nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm],
    ),
    private.Convolution: (
        [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose3d, nn.LazyConv2d],
        [nn.Linear, nn.Unfold, nn.MaxPool2d],
    ),
    private.Dropout: (
        [nn.Dropout, nn.Dropout1d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout],
        [nn.ReLU, nn.Identity],
    ),
    private.POOLING: (
        [nn.MaxPool1d, nn.AvgPool2d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool1d],
        [nn.Conv2d, nn.Upsample],
    ),
}


@pytest.mark.parametrize("base", KINDS)
def test_base_classes(base: Any) -> None:
    inside, outside = KINDS[base]
    assert all(issubclass(kind, base) for kind in inside)
    assert not any(issubclass(kind, base) for kind in outside)


def test_leaves_of_nested_containers() -> None:
    first, second = torch.ones(1), torch.zeros(2)
    nested = {"a": [first, (3, None)], "b": BaseModelOutput(last_hidden_state=second)}
    leaves = private.tree_leaves(nested)
    assert [each for each in leaves if isinstance(each, Tensor)] == [first, second]
    other = private.tree_map_only(Tensor, torch.numel, nested)
    assert other["a"] == [1, (3, None)]
    assert other["b"] == BaseModelOutput(last_hidden_state=2)


# Nodes ------------------------------------------------------------------------------------------


Saved = tuple[Tensor, dict[str, Any]]
"""The output of an operation, and what its node should have saved."""


def of_leaves(
    operation: Callable[..., Tensor], numbers: dict[str, Any] | None = None, **shapes: Any
) -> Callable[[], Saved]:
    """An operation on leaves of these shapes, which its node saves under their names."""

    def compute() -> Saved:
        leaves = {name: leaf(*shape) for name, shape in shapes.items()}
        return operation(*leaves.values()), leaves | (numbers or {})

    return compute


HEADS = (2, 2, 4, 8)
GEOMETRY = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1), "groups": 2}


def attention(*arguments: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*arguments, **options)


def an_embedding() -> Saved:
    indices = torch.tensor([[1, 2], [2, 0]])
    return F.embedding(indices, leaf(4, 3), padding_idx=2, scale_grad_by_freq=True), {
        "indices": indices,
        "padding_idx": 2,
        "scale_grad_by_freq": True,
    }


def an_embedding_bag(mode: str, number: int) -> Saved:
    indices, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    return F.embedding_bag(indices, leaf(4, 3), offsets, mode=mode, padding_idx=2), {
        "indices": indices,
        "offsets": offsets,
        "mode": number,
        "padding_idx": 2,
        "scale_grad_by_freq": False,
    }


def a_weighted_embedding_bag() -> Saved:
    indices, weights = torch.tensor([1, 2, 3]), torch.rand(3)
    output = F.embedding_bag(
        indices, leaf(4, 3), torch.tensor([0, 2]), mode="sum", per_sample_weights=weights
    )
    return output, {"per_sample_weights": weights}


def a_layer_norm() -> Saved:
    x = leaf(3, 5)
    variance, mean = torch.var_mean(x.detach(), 1, correction=0, keepdim=True)
    return F.layer_norm(x, (5,), leaf(5), leaf(5), eps=0.5), {
        "input": x,
        "result1": mean,
        "result2": (variance + 0.5).rsqrt(),
    }


def a_group_norm() -> Saved:
    x = leaf(3, 4, 5)
    variance, mean = torch.var_mean(x.detach().reshape(3, 2, 10), 2, correction=0)
    return F.group_norm(x, 2, leaf(4), leaf(4), eps=0.5), {
        "input": x,
        "group": 2,
        "result1": mean,
        "result2": (variance + 0.5).rsqrt(),
    }


def a_batch_norm(training: bool) -> Saved:
    x, mean, variance = leaf(6, 4), torch.randn(4), torch.rand(4)
    weight = leaf(4)
    of_batch, mean_of_batch = torch.var_mean(x.detach(), 0, correction=0)
    statistics = {"result1": mean_of_batch, "result2": (of_batch + 0.5).rsqrt()}
    output = F.batch_norm(x, mean, variance, weight, leaf(4), training, eps=0.5)
    return output, {
        "input": x,
        "weight": weight,
        "running_mean": mean,
        "running_var": variance,
        "training": training,
        "eps": 0.5,
    } | (statistics if training else {})


def a_masked_attention() -> Saved:
    mask = torch.randn(4, 4)
    return attention(*(leaf(*HEADS) for _ in range(3)), attn_mask=mask), {"attn_mask": mask}


def a_masked_selection() -> Saved:
    mask = torch.tensor([True, False, True])
    return leaf(3).masked_select(mask), {"mask": mask}


def a_selection() -> Saved:
    index = torch.tensor([2, 0])
    return leaf(3, 2).index_select(1, torch.tensor([1])).index_select(0, index), {
        "index": index,
        "dim": 0,
    }


SAVED: dict[str, Callable[[], Saved]] = {
    "AddmmBackward0": of_leaves(
        lambda x, weight: torch.addmm(leaf(2), x, weight, alpha=3, beta=2),
        {"alpha": 3, "beta": 2},
        mat1=(3, 4),
        mat2=(4, 2),
    ),
    "MmBackward0": of_leaves(torch.mm, self=(3, 4), mat2=(4, 2)),
    "BmmBackward0": of_leaves(torch.bmm, self=(2, 3, 4), mat2=(2, 4, 2)),
    "BaddbmmBackward0": of_leaves(
        lambda x, weight: torch.baddbmm(leaf(2, 3, 2), x, weight, alpha=2),
        {"alpha": 2},
        batch1=(2, 3, 4),
        batch2=(2, 4, 2),
    ),
    "SubBackward0": of_leaves(lambda: torch.sub(leaf(3), leaf(3), alpha=4), {"alpha": 4}),
    "MulBackward0": of_leaves(torch.mul, self=(3,), other=(3,)),
    "ConvolutionBackward0": of_leaves(
        partial(F.conv2d, **GEOMETRY),
        GEOMETRY | {"transposed": False},
        input=(2, 4, 5, 6),
        weight=(6, 2, 2, 2),
    ),
    "ConvolutionBackward0 transposed": of_leaves(
        lambda x: F.conv_transpose1d(x, leaf(4, 2, 2)), {"transposed": True}, input=(2, 4, 5)
    ),
    "EmbeddingBackward0": an_embedding,
    "EmbeddingBagBackward0 sum": partial(an_embedding_bag, "sum", 0),
    "EmbeddingBagBackward0 mean": partial(an_embedding_bag, "mean", 1),
    "EmbeddingBagBackward0 max": partial(an_embedding_bag, "max", 2),
    "EmbeddingBagBackward0 weighted": a_weighted_embedding_bag,
    "NativeLayerNormBackward0": a_layer_norm,
    "NativeGroupNormBackward0": a_group_norm,
    "NativeBatchNormBackward0 train": partial(a_batch_norm, True),
    "NativeBatchNormBackward0 eval": partial(a_batch_norm, False),
    "ScaledDotProductFlashAttentionForCpuBackward0": of_leaves(
        partial(attention, is_causal=True, scale=0.5),
        {"is_causal": True, "scale": 0.5, "dropout_p": 0.0},
        **dict.fromkeys(("query", "key", "value"), HEADS),
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0 masked": a_masked_attention,
    "WeightNormInterfaceBackward0": of_leaves(
        lambda v, g: torch._weight_norm(v, g, 0), {"dim": 0}, v=(3, 4), g=(3, 1)
    ),
    "MaskedSelectBackward0": a_masked_selection,
    "IndexSelectBackward0": a_selection,
}
"""Operations by the name of their node, each with what it should have saved."""


@pytest.mark.parametrize("case", SAVED)
def test_saved(case: str) -> None:
    torch.manual_seed(0)
    output, expected = SAVED[case]()
    node = output.grad_fn
    if case.startswith("Scaled"):  # some versions return a view of what the kernel has made
        while not type(node).__name__.startswith("Scaled"):
            node = node.next_functions[0][0]  # type: ignore[union-attr]
    assert type(node).__name__ == case.split()[0]
    integers = private.saved_integers(node)
    assert not any(isinstance(each, (Tensor, float)) for each in integers)
    for name, value in expected.items():
        found = private.saved(node, name)
        if isinstance(value, Tensor):
            torch.testing.assert_close(found.detach().reshape(value.shape), value.detach())
        else:
            assert isinstance(found, float) or found is None or found in integers
            assert found == value


def test_saved_by_no_node() -> None:
    node = (leaf(3, 4) @ leaf(4, 2)).grad_fn
    assert private.saved(node, "alpha", 1) == 1
    with pytest.raises(AttributeError):
        private.saved(node, "alpha")


def test_a_bag_of_each_index() -> None:
    output, _ = an_embedding_bag("mean", 1)
    assert private.saved(output.grad_fn, "offsets").tolist() == [0, 2]
    assert private.saved(output.grad_fn, "result1").tolist() == [0, 0, 1]


@pytest.mark.slow
def test_functions_behind_operators_of_the_library() -> None:
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    def all_copied(xs: list[Tensor]) -> list[Tensor]:
        return [x.clone() for x in xs]

    def backward(ctx: Any, gradients: Any) -> Any:
        needs.append(ctx.needs_input_grad)
        return gradients

    needs: list[Any] = []
    of_one: Any = torch.library.custom_op("gradlens_tests::copied", copied, mutates_args=())
    of_list: Any = torch.library.custom_op("gradlens_tests::all", all_copied, mutates_args=())
    for operator in (of_one, of_list):
        operator.register_autograd(backward, setup_context=lambda ctx, **_: setattr(ctx, "own", 1))
    for output in (of_one(leaf(2)), of_list([leaf(2), torch.ones(2)])[0]):
        node = output.grad_fn
        before = {**vars(node)}, node.needs_input_grad
        assert private.backward_function(node) is backward
        assert private.context_attributes(node) == {"own": 1}
        output.sum().backward()
        assert ({**vars(node)}, node.needs_input_grad) == before
    assert needs == [(True,), ([True, False],)]


def test_output_metadata() -> None:
    parts = leaf(3, 2).to(torch.bfloat16).unbind(1)
    assert [
        (tuple(m.shape), m.dtype, m.device.type) for m in private.output_metadata(parts[0].grad_fn)
    ] == [((3,), torch.bfloat16, "cpu")] * 2


def test_sequence_numbers_grow_in_the_order_of_the_forward_pass() -> None:
    x = leaf(3)
    outputs = [x.exp(), x.sin(), x.cos()]
    outputs.append(outputs[0] * outputs[2])
    numbers = [private.sequence_number(output.grad_fn) for output in outputs]
    assert numbers == sorted(set(numbers))


# Backward passes --------------------------------------------------------------------------------


def test_backward_passes_have_numbers_of_their_own() -> None:
    x = leaf(3)
    first, second = x.exp(), x.sin()
    found: list[int] = []
    for output in (first, second):
        output.register_hook(lambda _: found.append(private.backward_pass_id()))
    for _ in range(2):
        (first + second).sum().backward(retain_graph=True)
    assert found[0] == found[1] != found[2] == found[3]
    assert private.NO_BACKWARD_PASS == private.backward_pass_id() not in found


def test_checkpoints_are_recomputed_in_a_backward_pass() -> None:
    found: list[bool] = []

    def region(x: Tensor) -> Tensor:
        found.append(private.in_backward_pass())
        return x.exp().sin()

    checkpoint(region, leaf(3), use_reentrant=False).sum().backward()
    assert found == [False, True]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_pass_may_keep_the_graph(keeps: bool) -> None:
    output, found = leaf(3).exp(), list[bool]()
    output.register_hook(lambda _: found.append(private.keeps_graph()))
    output.sum().backward(retain_graph=keeps)
    assert found == [keeps]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_model_is_joined_inside_of_join(one_process: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    assert not private.is_joined(model)
    for enable in (True, False):
        with model.join(enable=enable):
            model(leaf(2, 3)).sum().backward()
            assert private.is_joined(model) == enable


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


# Gradient scalers -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_knows_whose_gradients_are_unscaled(fused: bool) -> None:
    parameters = [leaf(3) for _ in range(2)]
    optimizers = [torch.optim.Adam([each], fused=fused) for each in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(sum(each.square().sum() for each in parameters)).backward()
    stages = private.scaler_stages(scaler)
    scaled = [torch.ones(3).copy_(each.grad) for each in parameters]  # type: ignore[arg-type]
    done: set[int] = set()
    for change, optimizer in zip((scaler.unscale_, scaler.step), optimizers, strict=True):
        assert private.unscaled_optimizers(stages) == done
        change(optimizer)
        done.add(id(optimizer))
    for each, before in zip(parameters, scaled, strict=True):
        torch.testing.assert_close(each.grad, before / 8)
    scaler.update()
    assert private.unscaled_optimizers(stages) == done
    assert private.scaler_stages(scaler) is not stages
    assert private.unscaled_optimizers(private.scaler_stages(scaler)) == set()


# Tensors ----------------------------------------------------------------------------------------


def test_versions_count_changes_in_place() -> None:
    tensor = torch.zeros(3)
    detached, view, before = tensor.detach(), tensor[:1], private.version(tensor)
    tensor.add_(1)
    view.mul_(2)
    assert {private.version(t) for t in (tensor, detached, view)} == {before + 2}
    tensor.data.add_(1)
    assert private.version(tensor) == before + 2
    with torch.inference_mode():
        assert private.version(torch.zeros(3).add_(1)) == 0


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


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(())),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_recognised(name: str) -> None:
    found: list[bool] = []

    def look(x: Tensor) -> Tensor:
        found.append(private.in_transform())
        return x.square().sum()

    TRANSFORMS[name](look, torch.ones(3))
    assert found
    assert all(found)
    assert not private.in_transform()
    found.clear()
    torch.func.functional_call(nn.Linear(3, 3), {}, (torch.ones(3),))
    look(torch.ones(3, requires_grad=True)).backward()
    assert found == [False]


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


@pytest.mark.parametrize("is_python", [False, True])
def test_a_hook_of_a_node_is_called_first(is_python: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    output = BackwardHookFunction.apply(x)[0] if is_python else x.sin()
    called: list[int] = []
    handles = [output.grad_fn.register_hook(lambda *_: called.append(0))]
    assert len(private.hooks_beside(handles[0])) == 1
    handles += [output.grad_fn.register_hook(lambda *_, n=n: called.append(n)) for n in (1, 2)]
    assert len(private.hooks_beside(handles[2])) > 1
    private.call_first(handles[2])
    output.sum().backward()
    assert called == [2, 0, 1]


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


def doubled(self: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    """A hook of the kind that scripts can contain."""
    return 2 * output


def halved(self: Any, given: tuple[Tensor]) -> tuple[Tensor]:
    """A hook of the kind that scripts can contain."""
    return (given[0] / 2,)


REMOVALS: dict[str, Callable[[nn.Module, RemovableHandle, Hook], None]] = {
    "by its handle": lambda module, handle, hook: private.remove_hook(handle),
    "by name": lambda module, handle, hook: private.remove_forward_hook(module, hook),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_scripts_contain_all_hooks_but_those_that_are_left_out(
    copied: Callable[[nn.Module], nn.Module], removal: str
) -> None:
    module, x = nn.Linear(2, 2), torch.randn(3, 2)
    hooks = [LeftOut(), LeftOut()]
    first = private.add_hook(module.register_forward_hook, hooks[0], with_kwargs=True, prepend=True)
    users = module.register_forward_hook(doubled)
    before = private.add_hook(module.register_forward_pre_hook, hooks[1])
    other = module.register_forward_pre_hook(halved)
    truth = 2 * (x / 2 @ module.weight.T + module.bias)
    for each in (module, copied(module)):
        assert [*each._forward_hooks.values()] == [doubled]
        assert [*each._forward_pre_hooks.values()] == [halved]
        scripted = torch.jit.script(each)
        torch.testing.assert_close(scripted(x), truth)
        torch.testing.assert_close(each(x), truth)
    assert [hook.calls for hook in hooks] == [1, 1]
    REMOVALS[removal](module, first, hooks[0])
    private.remove_hook(before)
    for each in (module, copied(module)):
        torch.testing.assert_close(torch.jit.script(each)(x), truth)
    users.remove()
    other.remove()
    assert b"gradlens" not in pickle.dumps(module)


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


@pytest.mark.slow
def test_compiled_modules_are_recognised() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert private.compiled_modules(module) == []
    compiled = torch.compile(module, backend="eager")
    assert private.compiled_modules(compiled) == [compiled]  # type: ignore[arg-type]
    assert private.uncompiled(compiled) is private.uncompiled(module) is module  # type: ignore[arg-type]
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert private.compiled_modules(in_place) == [in_place]
    assert private.uncompiled(in_place) is in_place


def test_compiled_calls_can_be_replaced() -> None:
    module, calls = nn.Linear(2, 2), list[nn.Module]()
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    for each in (torch.compile(module, backend="eager"), in_place):
        call = private.compiled_call(each)  # type: ignore[arg-type]
        own = call or private.hooked_forward(each)  # type: ignore[arg-type]

        def replaced(x: Tensor, own: Any = own, each: Any = each) -> Any:
            calls.append(each)
            return own(x)

        private.set_compiled_call(each, replaced)  # type: ignore[arg-type]
        each(leaf(1, 2))
        assert calls[-1] is each
        assert private.compiled_call(copy.copy(each)) is None  # type: ignore[arg-type]
        private.set_compiled_call(each, call)  # type: ignore[arg-type]
        each(leaf(1, 2))
    assert len(calls) == 2


@pytest.mark.slow
def test_backward_passes_that_are_not_compiled() -> None:
    importlib.import_module("torch._dynamo")
    assert private.compiler_is_imported()
    autograd: Any = torch._dynamo.compiled_autograd
    with autograd._enable(torch.compile(backend="eager")):
        assert autograd.compiled_autograd_enabled
        with private.uncompiled_backward():
            assert not autograd.compiled_autograd_enabled
            compiling: list[bool] = []
            y = leaf(2) * 2
            y.register_hook(lambda _: compiling.append(torch.compiler.is_compiling()))
            y.sum().backward()
        assert autograd.compiled_autograd_enabled
    assert compiling == [False]
    with private.uncompiled_backward():
        assert not autograd.compiled_autograd_enabled


# The package ------------------------------------------------------------------------------------

PACKAGE = Path(gradlens.__file__).parent
PRIVATE = ("torch_private.py", "fully_shard.py")
SOURCES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in PRIVATE]


def test_saved_tensors_are_read_without_their_hooks() -> None:
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    plain = layer(x.requires_grad_()).grad_fn
    assert {*map(private.storage_number, private.saved_where_they_are(plain))} == {
        private.storage_number(x),
        private.storage_number(layer.weight),
    }
    recomputed = checkpoint(layer, x, use_reentrant=False).grad_fn
    assert private.saved_where_they_are(recomputed) == []
    indexed = layer.weight[torch.tensor([0, 0])].grad_fn
    assert [each.tolist() for each in private.saved_where_they_are(indexed)] == [[0, 0]]


def test_tensors_of_one_memory_have_the_same_storage_number() -> None:
    one, other = torch.ones(4), torch.ones(4)
    number = private.storage_number(one)
    assert private.storage_number(one[2:]) == number != private.storage_number(other)
    one.untyped_storage().resize_(0)
    assert private.storage_number(one) == number


def private_names_of_torch() -> set[str]:
    """Those of modules, tensors and nodes; of torch itself, nothing private is imported anyway."""
    node: Any = SAVED["AddmmBackward0"]()[0].grad_fn
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


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is torch.neg else found


class Doubled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * found if func is torch.neg else found


def test_functions_of_others_can_be_switched_off_and_on() -> None:
    one, doubled = torch.ones(()), torch.ones(()).as_subclass(Doubled)

    def values() -> list[float]:
        return [float(torch.neg(one)), float(torch.neg(doubled))]

    for mode, hidden in [(nullcontext(), [-1, -1]), (Doubling(), [-1, -1])]:
        with mode:
            before = values()
            with private.unseen():
                assert values() == hidden
                with private.torch_functions_on():
                    assert values() == before
            assert values() == before
    assert before == [-2, -4]


def test_the_default_device_stays() -> None:
    with torch.device("meta"), private.unseen():
        assert torch.ones(()).is_meta


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
