"""A traced step that follows plans, and the bytes that XLA assigns to it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import graphs
from graph_tools.xla.program import Program, compiled
from memsaving_gradients.capture.rest_of_step import Whole
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.driver.driver import Driver
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import BudgetError, PlanNote

__all__ = ["PLAIN", "Trial", "Trials"]

#: Fact: the share with which plans do nothing.
PLAIN = 1.0


@dataclass(frozen=True, eq=False)
class Trial:
    """A trial: the plans that the calls of a step follow.

    Attributes
    ----------
    drivers
        The driver of each call, which follows a plan.
    program
        The program that XLA compiled for the step; ``None``: it was not compiled.
    """

    drivers: Sequence[Driver]
    program: Program | None = None

    @property
    def assigned(self) -> int:
        """The bytes that XLA assigns, without arguments."""
        assert self.program is not None
        return self.program.assignment.transient

    @property
    def is_plain(self) -> bool:
        """Whether all calls are plain, since nothing can be saved."""
        return all(one.followed is None for one in self.drivers)

    @property
    def simulated(self) -> int:
        """The largest simulated peak of the calls, bytes."""
        followed = [one.followed for one in self.drivers if one.followed is not None]
        return max((one.outcome.plan.peak for one in followed), default=0)


class Trials:
    """The trials of one step, which was traced to its end.

    Parameters
    ----------
    graph
        The step's graph.
    sites
        Its calls for gradients, all of them plain.
    """

    def __init__(self, graph: tf.Graph, sites: Sequence[Site]) -> None:
        self.graph, self.sites = graph, sites
        self._known = len(graph.get_operations())
        self._idle = set(graph_state.idle(graph))
        self._peaks = [site.original()[1].peak for site in sites]

    @property
    def simulated(self) -> int:
        """The largest simulated peak of the calls if they are plain, bytes."""
        return max(self._peaks)

    def compiled(self) -> Program:
        """Return the program that XLA compiles for the step as it is now.

        Raises
        ------
        GraphError
            If XLA cannot compile it.
        """
        return compiled(self.graph, self.sites[0].options.batch)

    def within(self, share: float) -> Trial:
        """Follow plans that need at most ``share`` of the simulated bytes of plain training. No
        note is given if plain training fits.

        Raises
        ------
        BudgetError
            If there are none; the graph is as it was.
        """
        most = share * self.simulated
        shares = [min(PLAIN, most / max(peak, 1)) for peak in self._peaks]
        sites = [_anew(site, s) for site, s in zip(self.sites, shares, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanNote)
            trial = self._tried(sites)
        return replace(trial, program=self.compiled())

    def least(self) -> Trial:
        """Follow the plans of least memory."""
        sites = [_anew(site, PLAIN) for site in self.sites]
        for site in sites:
            site.whole = Whole(site.original()[1], {}, share=0.0, others=True)
        return replace(self._tried(sites), program=self.compiled())

    def as_asked(self) -> Trial:
        """Follow plans that keep the budgets of the calls in simulated bytes.

        Raises
        ------
        BudgetError
            If there are none; the graph is as it was.
        """
        return self._tried([_anew(site, site.options.budget) for site in self.sites])

    def take_back(self, trial: Trial) -> None:
        """Restore the step as it was before a trial."""
        self._undo(trial.drivers)

    def _tried(self, sites: Sequence[Site]) -> Trial:
        drivers: list[Driver] = []
        try:
            for site in sites:
                drivers.append(Driver(site).follow())
        except BudgetError:
            self._undo(drivers)
            raise
        return Trial(drivers)

    def _undo(self, drivers: Sequence[Driver]) -> None:
        for driver in reversed(drivers):
            driver.take_back()
        idle = graph_state.idle(self.graph)
        idle.clear()
        idle.update(self._idle)
        built = self.graph.get_operations()[self._known :]
        idle.update(map(graphs.creation_index, built))


def _anew(site: Site, budget: Any) -> Site:
    """Return the same computation, in the graph as it is now, with another budget."""
    call = replace(site.call, options=replace(site.call.options, budget=budget))
    return Site(call, site.given, without=site.without)
