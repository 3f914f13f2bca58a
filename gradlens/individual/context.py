"""Individual gradients without a cockpit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType

from torch import Tensor, nn

from gradlens.individual.batchnorm import BatchNormPolicy, check_batchnorm
from gradlens.individual.gathering import Gathering, LossReduction
from gradlens.individual.layers import Layers
from gradlens.individual.listening import Listening
from gradlens.individual.operator import GradientOperator
from gradlens.individual.tap import tap_of, tappable_modules


class individual_gradients(Mapping[str, GradientOperator]):  # noqa: N801
    """Individual gradients of the backward passes inside the context, by parameter name.

    ``model`` has been extended with ``gradlens.extend`` before its forward pass. The operators
    stay valid after the context, and keep the layers' inputs and output gradients alive as long
    as they are. ``loss`` is needed for parameters that no layer of their own holds, such as a
    class token or the packed projections of attention, if backward is called on a multiple of it,
    and to ``test``, by a backward pass of its own, whether samples of layers are those of the loss
    (``gradlens.individual.attribution``); without a test, backward may start elsewhere in the
    loss's graph. ``batchnorm`` says what a gradient is where samples are
    coupled (``gradlens.individual.batchnorm``). ``KeyError`` says why a parameter has none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_reduction: LossReduction = "mean",
        loss: Tensor | None = None,
        batch_size: int | None = None,
        batchnorm: BatchNormPolicy = "coupled",
        test: bool = True,
    ) -> None:
        check_loss_reduction(loss_reduction)
        check_batchnorm(batchnorm)
        require_extended(model)
        self._model = model
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._loss_reduction: LossReduction = loss_reduction
        self._loss = loss
        self._batch_size = batch_size
        self._gathering = Gathering(self._parameters, loss_reduction)
        self._batchnorm: BatchNormPolicy = batchnorm
        self._tested = None if test else frozenset(self._parameters)
        self._operators: dict[str, GradientOperator] = {}
        self._slept: frozenset[int] = frozenset()

    def __enter__(self) -> individual_gradients:
        self._operators = {}
        layers = Layers(self._model)
        self._slept = layers.parameters_slept_through
        self._gathering = Gathering(self._parameters, self._loss_reduction, self._batch_size)
        self._listening = Listening(
            self._model,
            layers,
            self._gathering,
            self._parameters,
            self._loss,
            besides=self._parameters,
            batchnorm=self._batchnorm,
            tested=self._tested,
        )
        self._listening.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listening.stop()
        self._gathering.explain_missing()
        if error is None and self._gathering.error is not None:
            raise self._gathering.error
        gathered = set(self._gathering.names)
        for name in (name for name in self._parameters if name in gathered):
            operator = self._gathering.take(name)
            if operator is not None:
                self._operators[name] = operator

    def __getitem__(self, name: str) -> GradientOperator:
        if name in self._operators:
            return self._operators[name]
        raise KeyError(self._why_absent(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    @property
    def coupling(self) -> frozenset[str]:
        """Layers that mix samples, whose individual gradients are contributions to the batch's."""
        return frozenset(self._gathering.coupling)

    @property
    def batch_size(self) -> int | None:
        """N, as the layers have seen it; ``None`` before the backward pass."""
        return self._gathering.batch_size

    def _why_absent(self, name: str) -> str:
        if name not in self._parameters:
            known = ", ".join(self._parameters)
            return f"no trainable parameter {name!r} (there are: {known})"
        unseen = UNWATCHED if id(self._parameters[name]) in self._slept else UNSEEN
        reason = self._gathering.missing.get(name, unseen)
        return f"no individual gradients of {name!r}: {reason}"


UNSEEN = (
    "no layer that holds it took part in the backward pass (it was not used, the backward pass "
    "was outside the context, or it is used in another way than by calling its layer, which is "
    "seen if the loss is passed to the context)"
)
UNWATCHED = (
    "its layer was not watched in the forward pass, since a cockpit expected nothing at this step: "
    "call gradlens.extend(model), and it is at each step"
)


def require_extended(model: nn.Module) -> None:
    """``RuntimeError`` if no layer of the model can be seen."""
    modules = tappable_modules(model)
    if modules and all(tap_of(module) is None for module in modules):
        raise RuntimeError(
            f"this {type(model).__name__} was never extended: call "
            "gradlens.extend(model) once, before the forward pass"
        )


def check_loss_reduction(loss_reduction: str) -> None:
    """``ValueError`` unless it is one of the two."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f'loss_reduction={loss_reduction!r} is unknown: use "mean" if the loss averages over '
            'the samples, "sum" if it adds them up'
        )
