"""The curvature above which an optimizer diverges on a quadratic, as a formula of its settings."""

from __future__ import annotations

import math

from gradlens.history.setup import Setup


def descent_threshold(
    rate: float, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> float:
    """The threshold of gradient descent: (2+2β)/η with momentum β, over 1+2β with Nesterov's.

    Dampening d makes a step of η one of (1−d)η. ∞ for a step of zero. Source: Cohen et al. (2021,
    arXiv:2103.00065), Section 2 and Appendix B.
    """
    rate *= 1 - (dampening if momentum else 0.0)
    threshold = (2 + 2 * momentum) / rate if rate else math.inf
    return threshold / (1 + 2 * momentum) if nesterov else threshold


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
    return descent_threshold(rate, momentum, dampening, bool(options.get("nesterov")))


def threshold_formula(setup: Setup) -> str:
    """How ``threshold_at`` is computed, with η for the learning rate and β for momentum."""
    options = setup.groups[0].options
    momentum = options.get("momentum")
    if not momentum:
        return "2/η"
    return "(2+2β)/(η+2ηβ)" if options.get("nesterov") else "(2+2β)/η"
