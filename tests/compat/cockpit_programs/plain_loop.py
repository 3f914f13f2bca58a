"""A plain loop with a preset; the figure is drawn before the first step, at each step and after."""

from pathlib import Path

import torch
from backpack import extend

from gradlens.compat.cockpit import Cockpit, CockpitPlotter
from gradlens.compat.cockpit.utils.configuration import configuration

torch.manual_seed(0)
network = extend(torch.nn.Sequential(torch.nn.Linear(8, 3)))
criterion = extend(torch.nn.CrossEntropyLoss())
unreduced = torch.nn.CrossEntropyLoss(reduction="none")
sgd = torch.optim.SGD(network.parameters(), lr=0.1)

cockpit = Cockpit(network.parameters(), quantities=configuration("full"))
plotter = CockpitPlotter()
plotter.plot(cockpit)

for step in range(2):
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    sgd.zero_grad()
    scores = network(x)
    loss = criterion(scores, y)
    info = {
        "batch_size": len(x),
        "individual_losses": unreduced(scores, y),
        "loss": loss,
        "optimizer": sgd,
    }
    with cockpit(step, info=info):
        loss.backward(create_graph=cockpit.create_graph(step))
    sgd.step()

plotter.plot(cockpit, block=True)
plotter.fig.savefig("screen.png")

assert sorted(cockpit.output) == [0, 1]
assert len(cockpit.output[1]["GradNorm"]) == len(cockpit.params) == 2
assert len(cockpit.output[1]["HessTrace"]) == 2
assert Path("screen.png").stat().st_size > 10_000
