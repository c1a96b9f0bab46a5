"""Measured budgets in programs that users might write.

Each program (`PROGRAMS`) is trained plain, by the default mode and within two budgets, patched as
by a user: ``ms.patched`` around the trace of a ``tf.function``, or the callback for ``fit``. A cell
has a process of its own. It compares the worst of five steps with the promises of plans, and the
step with TensorFlow's under op determinism, to the bit. If a budget is refused, the cell measures
the least budget that the error names.

Budgets are shares of simulated plain training. If a step computes several gradients, each has a
plan and a budget of its own; the largest counts as the step's here. Times are medians of five steps
in different processes, so they are rough.
"""

from __future__ import annotations

from typing import Any

from benchmarks.experiment import Columns, Experiment, Job, Page, Settings
from benchmarks.measuring import ENVIRONMENT
from benchmarks.users.page import HEADINGS, page
from benchmarks.users.verdicts import MODES, bars, lines, notes
from graph_tools.errors import GraphToolsError
from graph_tools.memory.measure import in_fresh_process

#: The function of each program, by name.
PROGRAMS: dict[str, str] = {
    "gradient penalty": "adversarial:wgan_gp",
    "CycleGAN": "adversarial:cyclegan",
    "PINN": "equations:pinn",
    "adaptive ODE": "equations:ode",
    "MAML": "meta:maml",
    "SAM": "meta:sam",
    "accumulation": "meta:accumulation",
    "accumulation loop": "meta:accumulation_loop",
    "RevNet": "vision:revnet",
    "DETR": "vision:detr",
    "diffusion": "vision:diffusion",
    "contrastive": "vision:contrastive",
    "triplets": "vision:triplets",
    "CTC": "sequences:ctc",
    "Dreamer": "sequences:dreamer",
    "WaveNet": "sequences:wavenet",
    "graph network": "sequences:graph_network",
    "mixture of experts": "sequences:experts",
    "ConvLSTM": "fitted:convlstm",
    "3-D U-Net": "fitted:unet3d",
}
#: Modes whose results are compared with plain ones.
COMPARED = ("default", "50 %")
#: The number of refusals in a row after which a cell asks for another budget.
MOST_REFUSALS = 4
#: Seconds before a process is killed.
LIMIT = 300.0


def rows(settings: Settings) -> list[str]:
    """Return the cells: all modes of all programs."""
    return [f"{program}/{mode}" for program in PROGRAMS for mode in MODES]


def run(job: Job) -> dict[str, Any]:
    """Measure a cell; if its process fails, the error is the result."""
    name, _, mode = job.row.partition("/")
    return cell(PROGRAMS[name], MODES[mode], compared=mode in COMPARED)


def cell(program: str, options: dict[str, Any] | None, *, compared: bool) -> dict[str, Any]:
    """Measure one program in one mode, or within the least budget if the mode's is refused.

    The least budget of one computation may be too little for another computation of the same step,
    which refuses it again.
    """
    asked: dict[str, Any] = {"program": program, "compare": compared}
    refused: list[dict[str, Any]] = []
    try:
        while True:
            found = _fresh({**asked, "options": options})
            if "refused" not in found:
                return {**found, "refused": refused}
            refused.append(found["refused"])
            if len(refused) > MOST_REFUSALS:
                budgets = ", ".join(f"{one['budget']:,}" for one in refused)
                error = (
                    f"{len(refused)} budgets in a row are refused: {budgets} bytes;"
                    f" the last error names {refused[-1]['least']:,} bytes"
                )
                return {"failed": {"error": error}}
            options = {**(options or {}), "budget": refused[-1]["fraction"]}
    except GraphToolsError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"failed": {"error": "\n".join(lines[-8:])[-1500:]}, "refused": refused}


def _fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    target = "benchmarks.users.probes:measured"
    found: dict[str, Any] = in_fresh_process(target, arguments, ENVIRONMENT, timeout=LIMIT)
    return found


COLUMNS = Columns(
    "budgets in programs of users' kinds (MB: 10^6 bytes of chunks)",
    " | ".join([*HEADINGS, ""]),
    lines,
    text=("mode", "kept", "results"),
)
EXPERIMENT = Experiment(
    "users",
    rows=rows,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    notes=notes,
    page=Page("programs.md", page),
)
