"""opacus's GradSampleModule as an independent oracle, on the networks that it supports."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import gradlens
from benchmarks.zoo.check import without_dropout
from tests.cases.networks import NETWORKS
from tests.cases.whole_networks import FAMILIES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opacus import GradSampleModule

SAMPLES = 4
LAYERS = (
    "mlp",
    "linear, sequence",
    "conv1d, stride and dilation",
    "conv2d, depthwise",
    "conv2d, same padding",
    "conv3d",
    "embedding",
    "layer norm, sequence",
    "group norm",
    "instance norm",
    "module used twice",
)
WRONG_IN_OPACUS = {
    "transformer.wpe.weight": "one gradient for all samples of positions without a batch axis",
    "bert.embeddings.position_embeddings.weight": "the same",
    "bert.embeddings.word_embeddings.weight": "the padding's row has a gradient",
}
WHOLE = (
    "GPT2LMHeadModel, T = 6",
    "BertForSequenceClassification, T = 6",
    "ViTForImageClassification, T = 6",
)


@pytest.mark.filterwarnings("ignore")  # opacus's own
@pytest.mark.parametrize("name", [*LAYERS, *WHOLE])
def test_same_as_opacus(name: str) -> None:
    torch.manual_seed(0)
    if name in WHOLE:
        network = FAMILIES[name].network()
        model, batch = network.build().double().train(), network.batch()
        without_dropout(model)

        def loss_of(net: torch.nn.Module) -> torch.Tensor:
            return network.loss(net, batch)
    else:
        model, inputs = NETWORKS[name].build().double(), NETWORKS[name].inputs(SAMPLES)

        def loss_of(net: torch.nn.Module) -> torch.Tensor:
            return net(inputs).sin().sum() / SAMPLES

    theirs = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    loss_of(theirs).backward()
    gradlens.extend(model)
    loss = loss_of(model)
    with gradlens.per_sample_gradients(model, loss=loss) as ours:
        loss.backward()

    expected = {n.removeprefix("_module."): p.grad_sample for n, p in theirs.named_parameters()}
    assert ours.keys() == expected.keys()
    for parameter, samples in expected.items():
        if parameter in WRONG_IN_OPACUS:
            continue
        found = samples if isinstance(samples, torch.Tensor) else torch.stack(samples).sum(0)
        largest = float(found.abs().max())
        torch.testing.assert_close(
            ours[parameter].dense(), SAMPLES * found, rtol=0, atol=1e-9 * max(largest, 1e-3)
        )
