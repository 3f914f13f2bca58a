"""Per-sample gradients without a cockpit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.gradients.gradients import Gradients, Setting, replicas_of
from gradlens.graph.fully_shard import sharding_of
from gradlens.graph.hooks import NO_MODULE
from gradlens.graph.loss import Batch, LossReduction
from gradlens.graph.model_calls import forget_calls, keep_calls
from gradlens.history.html import count, table
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.operator import GradientOperator
from gradlens.samples.batchnorm import BatchNormPolicy, check_batchnorm
from gradlens.torch_private import unseen


class per_sample_gradients(Mapping[str, GradientOperator]):  # noqa: N801
    """Per-sample gradients of the backward pass inside the context, by parameter name.

    Run the forward pass inside the context, too, or call ``gradlens.extend`` before it. The
    operators stay valid after the context, and keep references to the layers' inputs and output
    gradients. Without ``loss``, the loss is the tensor whose ``backward`` method is called; pass it
    if that is a multiple of the loss, or if backward is called in another way than
    ``loss.backward()``. ``batch_size`` is needed if the number of samples can't be found from the
    loss; the message says so. ``individual_losses`` ``[N]``, from which the loss was computed, say
    which sample is which. ``batchnorm`` chooses what a gradient is if batch normalisation
    couples the samples (``gradlens.samples.batchnorm``). A parameter without per-sample
    gradients raises a ``KeyError`` with the reason. If several processes train the model, the
    gradients are those of the process's own samples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_reduction: LossReduction = "mean",
        loss: Tensor | None = None,
        batch_size: int | None = None,
        batchnorm: BatchNormPolicy = "coupled",
        individual_losses: Tensor | None = None,
    ) -> None:
        check_loss_reduction(loss_reduction)
        check_batchnorm(batchnorm)
        if not isinstance(model, nn.Module):
            raise TypeError(NO_MODULE.format(kind=type(model).__name__))
        self._model = model
        sharding = sharding_of(model)
        shards = {} if sharding is None else sharding.shards()
        named = {name: shards.get(id(p), p) for name, p in model.named_parameters()}
        with unseen():
            parameters = {name: p for name, p in named.items() if p.requires_grad}
            self._setting = Setting(
                parameters,
                model,
                loss_reduction,
                batchnorm,
                sharding=sharding,
                replicas=replicas_of(model),
            )
        self._info = {
            "loss": loss,
            "batch_size": batch_size,
            "individual_losses": checked_losses(individual_losses),
        }
        self._operators: dict[str, GradientOperator] = {}
        self._gradients: Gradients | None = None
        self._contexts = ExitStack()

    def __enter__(self) -> per_sample_gradients:
        with unseen():
            self._enter()
        return self

    def _enter(self) -> None:
        self._operators = {}
        self._gradients = Gradients(self._setting, self._info, keep=lambda each: each)
        keep_calls(self._model, self._gradients)
        self._contexts.callback(forget_calls, self._model, self._gradients)
        self._contexts.enter_context(self._gradients.finding())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._gradients is not None
        reducer = self._gradients.reducer
        with unseen():
            self._contexts.close()
            reducer.finish()
        found = reducer.kept
        self._operators = {name: found[name] for name in self._setting.parameters if name in found}
        self._gradients.release()

    def squared_norms(self) -> Tensor:
        """‖gₙ‖² of every sample over all trainable parameters, ``[N]``.

        A parameter without gradients raises ``UnavailableError`` with the reason.
        """
        return _sum_of([each.squared_norms() for each in self._complete().values()])

    def norms(self) -> Tensor:
        """‖gₙ‖ of every sample over all trainable parameters, ``[N]``, as ``squared_norms``."""
        return self.squared_norms().sqrt()

    def gram(self, other: per_sample_gradients | None = None) -> Tensor:
        """⟨gₙ, gₘ⟩ over all trainable parameters, ``[N, N]``, as ``squared_norms``.

        With those of an ``other`` batch of M samples, each pair has one of them, ``[N, M]``: of
        training data and of validation data, say. ``ValueError`` for those of other parameters.
        """
        if not isinstance(other, per_sample_gradients | None):
            raise TypeError(
                f"other is a {type(other).__name__}: pass the per_sample_gradients of another batch"
            )
        own = self._complete()
        others = own if other is None else other._complete()
        shapes, of_others = ({name: [*g.shape] for name, g in b.items()} for b in (own, others))
        if shapes != of_others:
            raise ValueError(OTHER_PARAMETERS.format(own=shapes, others=of_others))
        return _sum_of([each.gram(others[name]) for name, each in own.items()])

    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """⟨gₙ, v⟩ of every sample, ``[N]``, with a direction v by parameter name.

        It is zero for parameters that it doesn't name. ``ValueError`` for names of no trainable
        parameter, and ``UnavailableError`` for those of parameters without gradients.
        """
        if not isinstance(direction, Mapping) or not direction:
            raise ValueError(NO_DIRECTION.format(kind=type(direction).__name__))
        for name, part in direction.items():
            if name not in self._setting.parameters:
                raise ValueError(self._why_absent(name))
            if not isinstance(part, Tensor):
                raise ValueError(NO_TENSOR.format(name=name, kind=type(part).__name__))
        found = self._complete(direction)
        return _sum_of([each.dot(direction[name].to(each.device)) for name, each in found.items()])

    def _complete(self, names: Iterable[str] | None = None) -> dict[str, GradientOperator]:
        """The operators of these parameters, or of all; ``UnavailableError`` if one has none."""
        names = [*(self._setting.parameters if names is None else names)]
        if not names:
            raise UnavailableError("the model has no parameters that require a gradient")
        for name in names:
            if name not in self._operators:
                raise UnavailableError(self._why_absent(name))
        return {name: self._operators[name] for name in names}

    def __getitem__(self, name: str) -> GradientOperator:
        if name in self._operators:
            return self._operators[name]
        raise KeyError(self._why_absent(name))

    def __repr__(self) -> str:
        """How many parameters have per-sample gradients, in one line."""
        found = f"{len(self)} of {count(len(self._setting.parameters), 'parameter')}"
        return f"per_sample_gradients({found}, N = {self.batch_size})"

    def _repr_html_(self) -> str:
        """A table of the operators by parameter, for notebooks."""
        rows = [
            (name, "x".join(map(str, p.shape)), self._operators.get(name) or self._why_absent(name))
            for name, p in self._setting.parameters.items()
        ]
        return table(repr(self), ("parameter", "shape", "operator"), rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    @property
    def coupling(self) -> frozenset[str]:
        """Layers that mix samples, whose per-sample gradients are contributions to the batch's."""
        return frozenset() if self._gradients is None else self._gradients.coupling

    @property
    def batch(self) -> Batch:
        """How many samples there were, and how that is known."""
        return Batch() if self._gradients is None else self._gradients.batch

    @property
    def batch_size(self) -> int | None:
        """N; ``None`` before the backward pass, and where it isn't known."""
        return self.batch.samples

    def _why_absent(self, name: str) -> str:
        if name not in self._setting.parameters:
            known = ", ".join(self._setting.parameters)
            return f"no trainable parameter {name!r} (there are: {known})"
        found = {} if self._gradients is None else self._gradients.collector.unavailable
        return f"no per-sample gradients of {name!r}: {found.get(name, UNSEEN)}"


def _sum_of(values: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, which may be on different devices, on that of the first."""
    return torch.stack([value.to(values[0].device) for value in values]).sum(0)


OTHER_PARAMETERS = (
    "inner products are those of gradients of the same parameters, and these are of {own}, the "
    "others of {others}: pass those of another batch of the same model"
)
NO_DIRECTION = (
    "the direction has no parts ({kind}): pass a dict of tensors by parameter name, such as "
    "{{name: each.mean() for name, each in g.items()}}"
)
NO_TENSOR = (
    "the direction's part for {name!r} is a {kind}: pass a tensor of the parameter's shape, or "
    "leave out the name where it is zero"
)
UNSEEN = (
    "no gradient has come to it: the backward pass was outside the context, or it didn't start at "
    "the loss that was passed, or it was run by other means than loss.backward() and the loss "
    "wasn't passed to the context"
)


def checked_losses(given: Any) -> Tensor | None:
    """Losses as a tensor, if there are any.

    ``TypeError`` for a list of those that the loss was computed from, which isn't in its graph.
    """
    listed = given if isinstance(given, (list, tuple)) else ()
    if any(isinstance(each, Tensor) and each.requires_grad for each in listed):
        raise TypeError(
            f"individual_losses is a {type(given).__name__} of tensors: make one tensor of them, "
            "losses = torch.stack(losses), and compute the loss from that, as in losses.mean()"
        )
    return None if given is None else torch.as_tensor(given)


def check_loss_reduction(loss_reduction: str) -> None:
    """``ValueError`` unless it is one of the two."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f'loss_reduction={loss_reduction!r} is unknown: use "mean" if the loss averages over '
            'the samples, "sum" if it adds them up'
        )
