"""Small networks, most of which are plain stacks of layers, at a constant learning rate."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn import functional
from torch.optim import Adagrad, Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import data
from benchmarks.diagnosis.development.networks import (
    Encoder,
    LanguageModel,
    Mixture,
    Recurrent,
    Words,
    cnn,
    mlp,
    normalised_cnn,
    normalised_signal_cnn,
    resnet,
    signal_cnn,
)
from benchmarks.diagnosis.problem import Problem

MOMENTUM = {"momentum": 0.9}

BASICS = (
    Problem("MLP", partial(mlp, 64, 48, 32, 10), data.digits, rate=0.1),
    Problem("CNN", cnn, data.digit_images, rate=0.03, options=MOMENTUM),
    Problem("ResNet", resnet, data.digit_images, rate=0.02, options={**MOMENTUM, "nesterov": True}),
    Problem(
        "BatchNorm CNN", normalised_cnn, data.digit_images, optimizer=Adam, rate=5e-3, steps=120
    ),
    Problem("BatchNorm signals", normalised_signal_cnn, data.signals, rate=0.05, options=MOMENTUM),
    Problem("encoder", Encoder, data.texts, optimizer=AdamW, rate=2e-3, steps=200),
    Problem("language model", LanguageModel, data.next_words, optimizer=Adam, rate=4e-3),
    Problem(
        "LSTM",
        partial(Recurrent, nn.LSTM, 1, 24, 4),
        data.waves,
        optimizer=Adam,
        rate=1e-2,
        steps=200,
    ),
    Problem(
        "GRU",
        partial(Recurrent, nn.GRU, 2, 20, 1),
        data.running_sums,
        functional.mse_loss,
        optimizer=RMSprop,
        rate=4e-3,
        steps=200,
    ),
    Problem(
        "regression", partial(mlp, 10, 32, 32, 1), data.friedman, functional.mse_loss, rate=0.05
    ),
    Problem(
        "small regression",
        partial(mlp, 10, 16, 1, activation=nn.ELU),
        data.diabetes,
        functional.mse_loss,
        rate=0.02,
        batch_size=16,
        steps=100,
    ),
    Problem(
        "tanh",
        partial(mlp, 13, 20, 20, 3, activation=nn.Tanh),
        data.wine,
        rate=0.1,
        batch_size=16,
        steps=100,
    ),
    Problem(
        "sigmoid",
        partial(mlp, 30, 24, 16, 1, activation=nn.Sigmoid),
        data.breast_cancer,
        functional.binary_cross_entropy_with_logits,
        RMSprop,
        rate=5e-3,
        batch_size=24,
        steps=100,
    ),
    Problem(
        "GELU and LayerNorm",
        partial(mlp, 20, 48, 48, 6, activation=nn.GELU, norm=True),
        data.clusters,
        optimizer=AdamW,
        rate=2e-3,
        options={"weight_decay": 0.01},
    ),
    Problem("mixture", partial(Mixture, 20, 16, 6, 4), data.clusters, optimizer=Adam, rate=1e-2),
    Problem(
        "mixture of regressions",
        partial(Mixture, 10, 12, 1, 6),
        data.friedman,
        functional.mse_loss,
        rate=0.05,
        options=MOMENTUM,
    ),
    Problem(
        "autoencoder",
        partial(mlp, 64, 32, 12, 32, 64, activation=nn.Tanh),
        data.reconstructed_digits,
        functional.mse_loss,
        Adam,
        rate=5e-3,
    ),
    Problem("words", Words, data.texts, optimizer=Adagrad, rate=0.1, steps=200),
    Problem(
        "deep tanh",
        partial(mlp, 2, 24, 24, 24, 24, 3, activation=nn.Tanh),
        data.spirals,
        rate=0.05,
        options=MOMENTUM,
        steps=250,
    ),
    Problem("signals", signal_cnn, data.signals, rate=0.1, batch_size=24, steps=200),
)
