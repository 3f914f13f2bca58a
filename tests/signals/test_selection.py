"""Which layers a selector means, and what it says if it means none."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gradlens
from gradlens import quantities, signals
from gradlens.signals import Selection, select, selection


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU()),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(8, 3),
    )


LEAVES = ["0.0", "0.1", "0.2", "1.0", "1.1", "2", "3", "4"]

SELECTIONS: dict[str, tuple[Selection, list[str]]] = {
    "all leaves": (selection(), LEAVES),
    "a name": (selection("0.1"), ["0.1"]),
    "a container by name": (selection("1"), ["1"]),
    "a glob": (selection("0.*"), ["0.0", "0.1", "0.2"]),
    "a glob across dots": (selection("*1"), ["0.1", "1.1"]),
    "the name of a class": (selection("Conv2d"), ["0.0", "1.0"]),
    "the name of a base class": (selection("_ConvNd"), ["0.0", "1.0"]),
    "a class": (selection(nn.ReLU), ["0.2", "1.1"]),
    "a container by class": (selection("Sequential"), ["Sequential", "0", "1"]),
    "an index": (selection(1), ["0.1"]),
    "the last one": (selection(-1), ["4"]),
    "a predicate": (selection(signals.is_activation), ["0.2", "1.1"]),
    "several": (selection([nn.Linear, "0.1", 0]), ["0.0", "0.1", "4"]),
    "without some": (selection(exclude=["0.*", nn.Flatten, "Dropout"]), ["1.0", "1.1", "4"]),
    "down to a depth": (selection(depth=1), ["0", "1", "2", "3", "4"]),
    "a glob down to a depth": (selection("*", depth=1), ["0", "1", "2", "3", "4"]),
    "only leaves": (selection(["*"], leaf=True), LEAVES),
    "all modules": (selection("*", leaf=False), ["Sequential", "0", *LEAVES[:3], "1", *LEAVES[3:]]),
    "an index of all modules": (selection(1, leaf=False), ["0"]),
    "a selection": (selection(selection("Conv2d")), ["0.0", "1.0"]),
    "a selection without some": (selection(selection("Conv2d"), exclude="0.*"), ["1.0"]),
    "without some, twice": (
        selection(selection("Conv2d", exclude="0.*"), exclude=nn.Flatten), ["1.0"]
    ),
    "a selection down to a depth": (selection(selection(), depth=1), ["0", "1", "2", "3", "4"]),
    "a selection of leaves": (selection(selection("*", leaf=False), leaf=True), LEAVES),
    "a string in the class itself": (Selection("Conv2d", nn.Flatten), ["0.0", "1.0"]),  # type: ignore[arg-type]
    "an empty tuple": (selection(()), LEAVES),
}  # fmt: skip


@pytest.mark.parametrize("case", SELECTIONS)
def test_selects(case: str) -> None:
    chosen, expected = SELECTIONS[case]
    found = select(model(), chosen)
    in_order = [name or "Sequential" for name, _ in model().named_modules()]
    assert list(found) == sorted(expected, key=in_order.index)


PREDICATES: dict[str, list[nn.Module]] = {
    "is_activation": [nn.ReLU(), nn.GELU(), nn.Softmax(dim=1), nn.PReLU()],
    "is_dropout": [nn.Dropout(), nn.AlphaDropout(), nn.Dropout2d()],
    "is_linear": [nn.Linear(1, 1), nn.Bilinear(1, 1, 1)],
    "is_convolution": [nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)],
    "is_normalization": [
        nn.BatchNorm1d(1), nn.LayerNorm(1), nn.GroupNorm(1, 1), nn.InstanceNorm2d(1), nn.RMSNorm(1)
    ],
    "is_recurrent": [nn.LSTM(1, 1), nn.GRUCell(1, 1)],
    "is_attention": [nn.MultiheadAttention(1, 1)],
    "is_embedding": [nn.Embedding(1, 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates_tell_kinds_of_layers_apart(name: str) -> None:
    predicate = getattr(signals, name)
    everything = [module for modules in PREDICATES.values() for module in modules]
    assert [m for m in everything if predicate(m)] == PREDICATES[name]
    assert not predicate(nn.Flatten())


def test_further_predicates() -> None:
    assert [signals.is_batch_norm(m) for m in PREDICATES["is_normalization"]][:2] == [True, False]
    affine = [*PREDICATES["is_linear"], *PREDICATES["is_convolution"]]
    for kind, modules in PREDICATES.items():
        assert {signals.is_affine(m) for m in modules} == {{*modules} <= {*affine}}
        assert {signals.is_no_activation(m) for m in modules} == {kind != "is_activation"}
    assert signals.has_parameters(nn.Linear(1, 1))
    assert not signals.has_parameters(nn.Sequential(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("Conv2D", "Conv2d"),
        ("0.9", "0.1"),
        ("conv", "Conv2d"),
        ("layers.*.attention", "there is"),
        (nn.LSTM, "no layer matches LSTM: the model has BatchNorm2d"),
        (signals.is_recurrent, "no layer matches is_recurrent"),
        (8, "there is no layer 8: the model has 8 of them"),
        (-9, "there is no layer -9"),
    ],
)
def test_a_selector_that_matches_nothing_raises_with_near_matches(selector: Any, hint: str) -> None:
    for chosen in (selection(selector), selection(exclude=selector)):
        with pytest.raises(ValueError, match=hint.replace("*", "[*]")):
            select(model(), chosen)


def test_an_empty_list_excludes_nothing() -> None:
    for nothing in ([], set(), {}):
        assert selection(exclude=nothing) == Selection()  # type: ignore[arg-type]


def test_modules_themselves() -> None:
    network: Any = model()
    assert list(select(network, selection(network[4]))) == ["4"]
    assert list(select(network, selection([network[0], network[3]]))) == ["0", "3"]
    assert list(select(network, selection(network))) == ["Sequential"]
    without = selection(exclude=[*network[0], network[2]])
    assert list(select(network, without)) == ["1.0", "1.1", "3", "4"]
    with pytest.raises(ValueError, match="is inside a layer, or no leaf"):
        select(network, selection(network[0][0], depth=1))


@pytest.mark.parametrize("kind", ["OutputNorm", "ParameterNorm", "UpdateGeometry"])
def test_exclude_applies_beside_a_selection(kind: str) -> None:
    chosen = selection(["Conv2d", "Linear"])
    quantity = getattr(quantities, kind)(layers=chosen, exclude="0.0")
    gradlens.Cockpit(model(), [quantity])
    found = quantity.modules if kind == "OutputNorm" else quantity.chosen
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in found} == {"1.0", "4"}


def test_attention_and_parametrised_layers_are_leaves() -> None:
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    found = select(nn.Sequential(nn.MultiheadAttention(4, 2), linear), selection())
    assert list(found) == ["0", "1"]
    assert list(select(nn.Sequential(linear), selection("Linear"))) == ["0"]


def test_the_model_itself_goes_by_its_class() -> None:
    assert list(select(nn.Linear(2, 2), selection())) == ["Linear"]
    child = nn.Sequential(OrderedDict(Sequential=nn.Linear(2, 2)))
    assert list(select(child, selection("Sequential"))) == ["Sequential"]
    assert list(select(child, selection(child))) == ["Sequential (itself)"]


def test_only_what_torch_calls_parametrizations_is_hidden() -> None:
    network = nn.Sequential(OrderedDict(my_parametrizations=nn.Linear(2, 2)))
    assert list(select(network, selection())) == ["my_parametrizations"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.0.weight", "1.0.bias"]),
        ({"parameters": "weight"}, ["0.0.weight", "0.1.weight", "1.0.weight"]),
        ({"parameters": ("weight",)}, ["0.0.weight", "0.1.weight", "1.0.weight"]),
        ({"layers": "Conv2d", "parameters": "bias"}, ["0.0.bias", "1.0.bias"]),
        ({"layers": "0", "exclude": nn.Flatten}, ["0.0.weight", "0.0.bias", "0.1.weight",
                                                  "0.1.bias"]),
        ({"exclude": ["0.*", nn.Linear]}, ["1.0.weight", "1.0.bias"]),
    ],
)  # fmt: skip
def test_parameters_of_layers(arguments: dict[str, Any], expected: list[str]) -> None:
    quantity = quantities.ParameterNorm(**arguments)
    gradlens.Cockpit(model(), [quantity])
    assert list(quantity.chosen)[: len(expected)] == expected
    assert len(quantity.chosen) == len(expected) or not arguments or "parameters" in arguments


def test_the_cockpit_names_the_quantity() -> None:
    with pytest.raises(ValueError, match=r"OutputNorm: .*did you mean ReLU"):
        gradlens.Cockpit(model(), [quantities.OutputNorm(layers="Relu")])


def test_parameters_alone_have_norms() -> None:
    parameters = list(gradlens.extend(model()).parameters())
    cockpit = gradlens.Cockpit(parameters, [quantities.ParameterNorm()])
    with cockpit(0):
        torch.stack([p.sum() for p in parameters]).sum().backward()
    assert len(cockpit.history["ParameterNorm"][0]["parameters"]) == len(parameters)
