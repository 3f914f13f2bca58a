"""What a run consists of: its optimizer, loss, layers and graph, as they were found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of an optimizer: its options that are numbers, and its parameters' names.

    ``options`` holds ``betas`` as ``beta1`` and ``beta2``, and switches as 0 or 1.
    """

    options: Mapping[str, float]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own.

    ``classes`` are the names of its class and of those it derives from, up to ``Module``, which is
    left out. ``fan_in`` is the number of inputs of one of its outputs; 0 without a weight.
    """

    classes: tuple[str, ...]
    training: bool
    fan_in: int = 0


@dataclass(frozen=True)
class Setup:
    """What a run consists of, from one step on.

    ``optimizer`` is the name of its class; empty if it wasn't passed to the context. ``missed`` are
    trainable parameters in none of its groups, and ``frozen`` those that need no gradient.
    ``loss`` is the kind of the loss's node in the graph, and ``loss_reduction`` what it says of
    itself; ``loss_weighted`` says that it has weights of classes or samples, and
    ``declared_reduction`` is that of the cockpit. ``activations`` are the kinds of the nonlinear
    nodes by the layer before each. ``order`` are the parameters from input to output,
    and ``transformed`` are weights that are changed before they multiply data, as by a
    softplus, a mask or a scale.
    ``before_loss`` is the kind of the node from which the loss's logarithm of probabilities is
    computed, if it makes probabilities itself; ``target_trained`` says that its target needs a
    gradient. ``unregistered`` are lists, tuples and dicts of modules with layers that aren't the
    model's. ``broadcast`` are the shapes of predictions and
    targets that it compares all pairs of. ``linear_pairs`` are pairs of layers with nothing
    but linear nodes between, and ``is_linear`` says that all of the network's nodes are linear.
    ``over_samples`` says that a softmax in front of the loss is over the samples, ``over_queries``
    that one of attention is over queries, whose values are summed over keys, ``of_one`` names
    what has a single element to normalise, ``rows_of_several`` says that a view has made rows of
    scores out of several places, and ``bootstrapped`` says that the loss's target adds a
    constant to the network's own prediction, through which a gradient flows.
    ``half`` says that there are nodes in float16, and ``scaler`` that a gradient scaler was passed.
    ``positions_first`` says that layers count samples along their second axis.
    """

    optimizer: str = ""
    groups: tuple[ParameterGroup, ...] = ()
    missed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    loss: str = ""
    loss_reduction: str = ""
    loss_weighted: bool = False
    declared_reduction: str = ""
    layers: Mapping[str, Layer] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    transformed: tuple[str, ...] = ()
    over_samples: bool = False
    over_queries: bool = False
    of_one: str = ""
    rows_of_several: bool = False
    bootstrapped: bool = False
    before_loss: str = ""
    target_trained: bool = False
    unregistered: tuple[str, ...] = ()
    broadcast: str = ""
    linear_pairs: tuple[tuple[str, str], ...] = ()
    is_linear: bool = False
    half: bool = False
    scaler: bool = False
    dtypes: tuple[str, ...] = ()
    input_kind: str = ""
    input_normalised: bool = False
    positions_first: bool = False


# The curvature above which the optimizer diverges on a quadratic -----------------------------


def passed_by_momentum(momentum: float, dampening: float = 0.0, nesterov: bool = False) -> float:
    """The share of a gradient of alternating sign that SGD's momentum lets pass.

    The threshold of gradient descent with rate η is 2/η over this share: (2+2β)/η with momentum β,
    over 1+2β with Nesterov's, and over 1−d with dampening d. Source: Cohen et al. (2021,
    arXiv:2103.00065), Section 2 and Appendix B.
    """
    share = (1 - (dampening if momentum else 0.0)) / (1 + momentum)
    return share * (1 + 2 * momentum) if nesterov else share


def threshold_at(setup: Setup, rate: float) -> float:
    """The threshold of a run's mean loss at a learning rate; NaN where none is known.

    None is known of optimizers besides SGD, whose preconditioners aren't in the setup, of several
    parameter groups, whose learning rates may differ, with weight decay, which adds curvature, and
    of losses that are sums.
    """
    is_sum = "sum" in (setup.loss_reduction, setup.declared_reduction)
    if setup.optimizer != "SGD" or len(setup.groups) != 1 or is_sum or not rate > 0:
        return math.nan
    options = setup.groups[0].options
    if options.get("weight_decay") or options.get("maximize"):
        return math.nan
    momentum, dampening = options.get("momentum", 0.0), options.get("dampening", 0.0)
    passed = passed_by_momentum(momentum, dampening, bool(options.get("nesterov")))
    return 2 / (rate * passed) if passed else math.inf


def threshold_formula(setup: Setup) -> str:
    """How ``threshold_at`` is computed, with η for the learning rate and β for momentum."""
    options = setup.groups[0].options
    momentum = options.get("momentum")
    if not momentum:
        return "2/η"
    return "(2+2β)/(η+2ηβ)" if options.get("nesterov") else "(2+2β)/η"
