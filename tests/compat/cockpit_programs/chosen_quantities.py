"""Quantities on schedules of their own, one added later, a BackPACK extension, and files."""

import json
from pathlib import Path

import torch
from backpack import extend, extensions
from gradlens.compat.cockpit.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from matplotlib import pyplot

from gradlens.compat.cockpit import Cockpit, CockpitPlotter, quantities
from gradlens.compat.cockpit.utils import schedules

torch.manual_seed(0)
network = extend(torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)))
criterion = extend(torch.nn.CrossEntropyLoss())
adam = torch.optim.Adam(network.parameters())
logpath = "logs/deep/run"

often = schedules.linear(interval=1)
tracked = [
    quantities.Loss(often),
    quantities.UpdateSize(track_schedule=often),
    quantities.Parameters(schedules.logarithmic(0, 1, steps=3)),
    quantities.GradHist1d(often, bins=10, adapt=GradAbsMax(often)),
]
cockpit = Cockpit(network.parameters(), quantities=tracked)
by_layer = quantities.GradHist2d(
    schedules.linear(2),
    bins=(8, 6),
    range=((-1, 1), (-2, 2)),
    keep_individual=True,
    adapt=(GradAbsMax(often), ParamAbsMax(often)),
)
cockpit.add(by_layer)
plotter = CockpitPlotter(secondary_screen=True)

for epoch in range(2):
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    adam.zero_grad()
    loss = criterion(network(x), y)
    with cockpit(
        epoch, extensions.DiagHessian(), info={"batch_size": 6, "loss": loss, "optimizer": adam}
    ):
        loss.backward()
    assert all(p.diag_h.shape == p.shape for p in network.parameters())
    adam.step()
    cockpit.write(logpath)

plotter.plot(cockpit, savedir="plots", show_plot=False, save_plot=True, savename_append=str(epoch))
assert {path.name for path in Path("plots").iterdir()} == {
    "cockpit__primary__1.png",
    "cockpit__secondary__1.png",
}
pyplot.savefig("current.png")
assert pyplot.gcf() is plotter.fig
titles = {axes.get_title(loc="left") for axes in plotter.secondary_fig.axes}
assert "Joint histogram by parameter" in titles

log = json.loads(Path(f"{logpath}.json").read_text())
assert sorted(log) == ["0", "1"]
assert set(log["0"]) == {"Loss", "UpdateSize", "Parameters", "GradHist1d", "GradHist2d"}
assert log["0"]["GradHist2d"]["param_groups"] == 4
assert tracked[1].get_output().keys() == {0, 1}
assert [len(update) for update in tracked[1].output.values()] == [4, 4]
CockpitPlotter().plot(logpath, show_plot=False, discard=0)
