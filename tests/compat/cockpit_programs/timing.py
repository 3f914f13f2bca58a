"""What each preset costs, by the clock that runs along."""

import torch
from backpack import extend
from gradlens.compat.cockpit.quantities.bin_adaptation import GradAbsMax, ParamAbsMax

from gradlens.compat.cockpit import Cockpit
from gradlens.compat.cockpit.quantities import GradHist2d, Time
from gradlens.compat.cockpit.utils.configuration import quantities_cls_for_configuration
from gradlens.compat.cockpit.utils.schedules import linear

STEPS = 2


def build(classes, schedule):
    """Instances of quantities, those of two-dimensional histograms with adapted ranges."""
    adapted = (GradAbsMax(schedule), ParamAbsMax(schedule))
    return [q(schedule, adapt=adapted) if q == GradHist2d else q(schedule) for q in classes]


def seconds_per_step(quantities):
    """Train for some steps."""
    assert all(quantity.output == {} for quantity in quantities)
    network = extend(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    criterion = extend(torch.nn.CrossEntropyLoss())
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    cockpit = Cockpit(list(network.parameters()), quantities=quantities)
    for step in range(STEPS + 1):
        sgd.zero_grad()
        loss = criterion(network(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))
        with cockpit(step, info={"batch_size": 4, "loss": loss, "optimizer": sgd}):
            loss.backward()
        sgd.step()
    times = [cockpit.get_output()[step]["Time"] for step in (0, STEPS)]
    return (times[1] - times[0]) / STEPS


before = Cockpit.BACKPACK_CONV_SAVE_MEMORY
for save_memory in (True, False):
    Cockpit.BACKPACK_CONV_SAVE_MEMORY = save_memory
    for label in ("economy", "business", "full"):
        classes = [*quantities_cls_for_configuration(label), Time]
        assert seconds_per_step(build(classes, linear(1))) > 0
Cockpit.BACKPACK_CONV_SAVE_MEMORY = before
