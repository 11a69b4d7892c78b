"""A run from its first lease to its last version, on a virtual clock."""

from blocktrain.simulate.agenda import Agenda
from blocktrain.simulate.learner import Learner
from blocktrain.simulate.population import draw_workers
from blocktrain.simulate.report import Report, report_of
from blocktrain.simulate.scenario import Scenario
from blocktrain.simulate.tally import Tally
from blocktrain.simulate.virtual_coordinator import VirtualCoordinator
from blocktrain.simulate.virtual_workers import VirtualWorkers


def simulate(scenario: Scenario, coordinator: VirtualCoordinator | None = None) -> Report:
    """What became of a run; `coordinator`: one that watches itself, for tests."""
    settings, agenda, tally = scenario.simulate, Agenda(), Tally()
    coordinator = coordinator or new_coordinator(scenario)
    workers = draw_workers(settings)
    VirtualWorkers(scenario, agenda, coordinator, workers, tally)

    def sample() -> None:
        tally.sample(coordinator, agenda.now)
        agenda.at(agenda.now + settings.sample_seconds, sample)

    sample()
    agenda.run(settings.longest_seconds)
    tally.sample(coordinator, agenda.now)
    tally.close(workers, agenda.now)
    return report_of(scenario, coordinator, tally, agenda)


def new_coordinator(scenario: Scenario, learner: Learner | None = None) -> VirtualCoordinator:
    return VirtualCoordinator(
        scenario.swarm, scenario.block_count, scenario.train.steps, learner, scenario.lead
    )
