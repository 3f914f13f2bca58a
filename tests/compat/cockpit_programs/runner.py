"""A class that trains for epochs, logs them, plots on a schedule, and reads its log in a table."""

import torch
from backpack import extend

from gradlens.compat.cockpit import Cockpit
from gradlens.compat.cockpit.plotter import CockpitPlotter
from gradlens.compat.cockpit.quantities import Alpha, HessMaxEV, Loss, Parameters, Time
from gradlens.compat.cockpit.utils import configuration, schedules


class Runner:
    """Trains one network."""

    def __init__(self, optimizer_class, quantities, plot_schedule, secondary_screen=False):
        self.optimizer_class = optimizer_class
        self.quantities = quantities
        self.plot_schedule = plot_schedule
        self.secondary_screen = secondary_screen

    def run(self, epochs, logpath):
        """Train, and write the log."""
        torch.manual_seed(0)
        network = extend(torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False)))
        criterion = extend(torch.nn.MSELoss())
        optimizer = self.optimizer_class(network.parameters(), lr=0.1)
        trainable = [p for p in network.parameters() if p.requires_grad]
        cockpit = Cockpit(trainable, quantities=self.quantities)
        plotter = CockpitPlotter(secondary_screen=self.secondary_screen)
        step = 0
        for epoch in range(epochs + 1):
            cockpit.log(step, epoch, 0.5, 0.6, 0.7, 0.0, 0.0, 0.0, optimizer.param_groups[0]["lr"])
            if epoch == epochs:
                break
            for _ in range(2):
                x = torch.randn(4, 2)
                optimizer.zero_grad()
                difference = (network(x) - x.sum(1, keepdim=True)) ** 2
                loss = criterion(network(x), x.sum(1, keepdim=True))
                info = {
                    "batch_size": len(x),
                    "individual_losses": difference.mean(1),
                    "loss": loss,
                    "optimizer": optimizer,
                }
                with cockpit(step, info=info):
                    loss.backward(create_graph=cockpit.create_graph(step))
                if self.plot_schedule(step):
                    plotter.plot(cockpit, savedir=logpath, show_plot=False, save_plot=True)
                optimizer.step()
                step += 1
        cockpit.write(logpath)


Cockpit.BACKPACK_CONV_SAVE_MEMORY = False
every_step = schedules.linear(1)
quantities = [cls(track_schedule=every_step) for cls in (Alpha, Parameters, HessMaxEV, Loss, Time)]
Runner(torch.optim.SGD, quantities, schedules.linear(10, offset=3)).run(2, "results/run__log")
Runner(torch.optim.SGD, configuration.configuration("economy"), lambda step: False).run(1, "b")

plotter = CockpitPlotter()
plotter._read_tracking_results("results/run__log")
data = plotter.tracking_data
assert list(data["iteration"]) == [0, 1, 2, 3, 4]
assert data.train_accuracy.iloc[-1] == 0.0
assert data.learning_rate.min() == data.learning_rate.max() == 0.1
assert data.Time.dropna().is_monotonic_increasing
assert data.Alpha.dropna().between(-2, 2).all()
assert data[["iteration", "HessMaxEV"]].dropna().shape == (4, 2)
assert len(data.Parameters.dropna().iloc[0][0][0]) == 2
