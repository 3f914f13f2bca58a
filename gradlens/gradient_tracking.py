"""Individual gradients of a cockpit's steps: from entering a context to their reductions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo import OptimizedModule

from gradlens.coverage import Coverage
from gradlens.individual.attribution import MIXED, Verdict
from gradlens.individual.batchnorm import BatchNormPolicy
from gradlens.individual.consistency import Discrepancy, inconsistent, remark_on
from gradlens.individual.context import UNSEEN
from gradlens.individual.gathering import LossReduction
from gradlens.individual.layers import Layers
from gradlens.individual.listening import Listening
from gradlens.individual.reducing import ReducedGradients
from gradlens.individual.reductions import Reduction
from gradlens.individual.shares import Share, exchanged, joined
from gradlens.individual.tap import Watch


class GradientTracking:
    """What is known from step to step.

    ``look_seconds`` is what the latest step has spent on checking what later ones take for granted,
    ``has_parts`` that batches come in parts, ``waiting`` are the shares of micro-batches whose last
    one is still to come, ``group`` the processes that train together.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        model: nn.Module | None,
        loss_reduction: LossReduction,
        batchnorm: BatchNormPolicy = "coupled",
        group: dist.ProcessGroup | None = None,
        compiled: bool = False,
        loss_function: nn.Module | None = None,
    ) -> None:
        self.parameters = parameters
        self.model = model
        self.loss_reduction: LossReduction = loss_reduction
        self.batchnorm: BatchNormPolicy = batchnorm
        self.group = group
        self._watch = Watch()
        self._may_sleep = True
        for watched in (model, loss_function):
            if watched is not None:
                self._watch.over(watched)
        self._compiled = compiled
        self.compared = False
        self.used_elsewhere: set[str] = set()
        # By a hash of the shapes of layers' outputs, which may differ at every step.
        self.verdicts: dict[int, Verdict] = {}
        self.look_seconds = 0.0
        self.has_parts = group is not None
        self.waiting: list[Share] = []
        self._waiting_for: int | None = None

    def begin_step(self, global_step: int, accumulating: bool) -> str:
        """Forget micro-batches whose step never ended; a remark, if there are any."""
        self.look_seconds = 0.0
        self.has_parts |= accumulating
        left = len(self.waiting) if self._waiting_for != global_step else 0
        before, self._waiting_for = self._waiting_for, global_step
        if not left:
            return ""
        self.waiting.clear()
        return LEFT_OVER.format(count=left, step=before)

    def expect(self, needed: bool) -> None:
        """Watch forward passes to come if they may be ``needed``, as far as can be foreseen."""
        self._watch.awake = needed or not self._may_sleep

    def stay_awake(self) -> None:
        """Watch each forward pass from now on, since there is no telling what is needed when."""
        self._may_sleep, self._watch.awake = False, True

    @property
    def has_slept(self) -> bool:
        """Whether the latest forward pass was not watched."""
        return self.model is not None and bool(Layers(self.model).parameters_slept_through)

    def close(self) -> None:
        """Watch no forward pass any more."""
        self._watch.awake = False

    def at_step(
        self,
        reductions: Iterable[Reduction],
        retain: bool,
        info: Mapping[str, Any],
        accumulating: bool,
    ) -> StepGradients:
        """Those of the backward pass to come."""
        return StepGradients(self, set(reductions), retain, info, accumulating)

    @property
    def is_first_process(self) -> bool:
        """Whether this process speaks for its group."""
        return self.group is None or dist.get_rank(self.group) == 0

    def compiled_prefixes(self) -> tuple[str, ...]:
        """How the names of parameters begin that belong to compiled modules."""
        if self._compiled:
            return ("",)
        named = [] if self.model is None else self.model.named_modules()
        compiled = [name for name, module in named if is_compiled(module)]
        return tuple(f"{name}." if name else "" for name in compiled)

    def joins(self, accumulating: bool) -> bool:
        """Whether a backward pass is only a part of what a step is about."""
        return accumulating or bool(self.waiting) or self.group is not None


class StepGradients:
    """Individual gradients of one backward pass.

    ``gathering`` holds their reductions after ``finish``. ``loss`` and ``individual_losses`` are
    those of the whole batch, where it has parts.
    """

    def __init__(
        self,
        tracking: GradientTracking,
        reductions: set[Reduction],
        retain: bool,
        info: Mapping[str, Any],
        accumulating: bool,
    ) -> None:
        self._tracking = tracking
        self._info = info
        self._joins = tracking.joins(accumulating)
        self.accumulating = accumulating
        if not (tracking.compared or self._joins):
            reductions = reductions | {Discrepancy()}
        self.gathering = ReducedGradients(
            tracking.parameters,
            tracking.loss_reduction,
            reductions,
            info.get("batch_size"),
            retain,
            waits=self._joins,
        )
        self._listening: Listening | None = None
        self._shapes = 0
        self._slept: frozenset[int] = frozenset()
        self.joined: Share | None = None

    def listen(self) -> None:
        """To the model's backward pass; with frozen statistics, all is heard at once."""
        tracking = self._tracking
        if tracking.model is None:
            return
        layers = Layers(tracking.model)
        self._slept = layers.parameters_slept_through
        if self._slept:
            tracking.stay_awake()
        self._shapes = hash(layers.shapes_of_calls)
        verdict = tracking.verdicts.get(self._shapes, Verdict())
        self.gathering.leave_out(dict.fromkeys(verdict.refuted, MIXED))
        self.gathering.left_to_graph |= verdict.left_to_graph
        self.gathering.orders |= verdict.orders
        some = tracking.used_elsewhere | verdict.left_to_graph
        everything = verdict.is_due or not tracking.compared
        self._listening = Listening(
            tracking.model,
            layers,
            self.gathering,
            tracking.parameters,
            self._info.get("loss"),
            tracking.parameters if everything else some,
            tracking.batchnorm,
            tested=None if verdict.is_due else verdict.tested,
        )
        start = time.perf_counter()
        self._listening.start()
        if everything:
            tracking.look_seconds += time.perf_counter() - start

    def stop_listening(self) -> None:
        """The backward pass is over."""
        if self._listening is not None:
            self._listening.stop()
        self._listening = None

    def finish(self, individual_losses: Tensor | None) -> None:
        """Reduce what is left, and join the parts of the batch if this was the last one."""
        self.gathering.finish()
        self._judge()
        self._refuse_compiled()
        if not self._joins:
            return
        tracking = self._tracking
        share = self._share(individual_losses)
        if self.accumulating:
            tracking.waiting.append(share)
            return
        shares, tracking.waiting = [*tracking.waiting, share], []
        whole = joined(shares, tracking.loss_reduction)
        if tracking.group is not None:
            device = next(iter(tracking.parameters.values())).device
            everyone = exchanged(whole, device, tracking.group)
            whole = joined(everyone, tracking.loss_reduction)
        self.gathering.take_joined(whole.operators, whole.missing, whole.coupling)
        self.gathering.batch_size = whole.batch_size
        self.joined = whole

    def _judge(self) -> None:
        """Remember what this step has told of all that are like it."""
        tracking, gathering = self._tracking, self.gathering
        tracking.used_elsewhere |= gathering.told_by_graph
        before = tracking.verdicts.get(self._shapes, Verdict())
        tracking.verdicts[self._shapes] = before.after(gathering.attribution)

    def _refuse_compiled(self) -> None:
        """Nothing at all is seen of a model that is compiled as a whole."""
        gathering = self.gathering
        wanted = gathering.values.keys() - {Discrepancy()}
        if wanted and not gathering.covered and self._tracking.compiled_prefixes():
            gathering.error = gathering.error or RuntimeError(COMPILED[0].upper() + COMPILED[1:])

    def _share(self, individual_losses: Tensor | None) -> Share:
        gathering, loss, model = self.gathering, self._info.get("loss"), self._tracking.model
        samples = gathering.batch_size
        if samples is None and model is not None:
            samples = Layers(model).samples
        return Share(
            samples,
            gathering.factor,
            None if loss is None else float(loss.detach()),
            individual_losses,
            dict(gathering.waiting),
            self._missing,
            frozenset(gathering.coupling),
        )

    @property
    def _missing(self) -> dict[str, str]:
        """Why parameters have no individual gradients."""
        gathering, compiled = self.gathering, self._tracking.compiled_prefixes()
        absent = [name for name in self._tracking.parameters if name not in gathering.covered]
        unseen = {n: COMPILED if n.startswith(compiled) else UNSEEN for n in absent}
        reasons = {name: gathering.missing.get(name, reason) for name, reason in unseen.items()}
        slept = (n for n in absent if id(self._tracking.parameters[n]) in self._slept)
        return reasons | dict.fromkeys(slept, SLEPT)

    @property
    def slept(self) -> bool:
        """Whether some layers were not watched in the forward pass."""
        return bool(self._slept)

    @property
    def refusal(self) -> str:
        """Why nothing is covered, where layers were heard of."""
        refused = {n: r for n, r in self.gathering.missing.items() if n in self._missing}
        refused |= {n: reason for n, reason in self._missing.items() if reason == SLEPT}
        if self.gathering.covered or not (refused and (self.gathering.heard or self._slept)):
            return ""
        name, reason = next(iter(refused.items()))
        return f"no parameter has individual gradients; of {name}: {reason}"

    @property
    def coverage(self) -> Coverage:
        """The ledger's entry for this step."""
        return Coverage(
            self._missing,
            tuple(sorted(self.gathering.coupling)),
            self._tracking.batchnorm,
        )

    def remarks(self) -> Iterator[str]:
        """What the user should know of this step."""
        factor = self.gathering.factor
        if factor > 1 and "scaler" not in self._info:
            yield SCALED.format(factor=f"{factor:.6g}")
        attribution = self.gathering.attribution
        if attribution is not None and attribution.obstacle:
            yield UNTESTED.format(obstacle=attribution.obstacle)
        wrong = self._inconsistent()
        if wrong:
            yield remark_on(wrong)

    def _inconsistent(self) -> tuple[str, ...]:
        """Parameters whose samples' gradients don't add up; asked until that has been settled."""
        tracking, gathering = self._tracking, self.gathering
        if tracking.compared:
            return ()
        found = gathering.values.get(Discrepancy())
        if found is None or gathering.closed:
            tracking.compared = True
            return ()
        wrong = inconsistent(found, gathering.epsilon)
        tracking.compared = wrong is not None
        return wrong or ()

    def release(self) -> None:
        """Let go of all gradients."""
        self.stop_listening()
        self.gathering.stop()


def process_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that a model is trained by, if it is wrapped for several."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group
    return None


LEFT_OVER = (
    "{count} micro-batches of step {step} have no values, since none of them was the last "
    "(accumulating=False)"
)
SCALED = (
    "backward was called on {factor} times the loss. Individual gradients are those of the loss "
    "itself; GradNorm and others that look at p.grad see it as it is: with a GradScaler, pass "
    "scaler=... to the context"
)
SLEPT = (
    "nothing was expected at this step, and its layers were not watched in the forward pass; they "
    "are from now on. Where steps come irregularly, run it inside cockpit.forward(step)"
)
UNTESTED = (
    "whether samples of layers are those of the loss isn't tested, and folded samples are not "
    "covered: {obstacle}"
)
COMPILED = (
    "its layer ran compiled, where individual gradients can't be seen: at tracked steps, run the "
    'forward pass inside torch.compiler.set_stance("force_eager")'
)


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs what ``torch.compile`` has made of it."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside ``DistributedDataParallel`` or ``torch.compile``."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    if isinstance(model, OptimizedModule):
        return unwrapped(model._orig_mod)
    return model
