"""The main figures of founding works, run or planned again, against ours.

Results of another benchmark are taken from its file.
"""

from __future__ import annotations

from typing import Any

from benchmarks.experiment import Experiment, Job, Page, Results
from benchmarks.papers import checkpointing, chen, meng, rotor, sohoni
from benchmarks.papers.page import columns, page
from benchmarks.papers.rows import Line, Work

WORKS = (chen.WORK, rotor.WORK, meng.WORK, sohoni.WORK, checkpointing.WORK)


def experiment_of(works: tuple[Work, ...]) -> Experiment:
    """Return the experiment whose rows are the jobs of all works."""
    jobs = {name: job for work in works for name, job in work.jobs.items()}

    def run(job: Job) -> dict[str, Any]:
        return jobs[job.row](job.again)

    def bars(results: Results) -> list[Line]:
        return [line for work in works for line in work.lines(results)]

    def text(results: Results) -> str:
        return page([(work, work.lines(results)) for work in works], results)

    return Experiment(
        "papers",
        rows=lambda settings: jobs,
        run=run,
        columns=tuple(map(columns, works)),
        bars=bars,
        bars_in_columns=True,
        page=Page("founding-figures.md", text),
    )


EXPERIMENT = experiment_of(WORKS)
