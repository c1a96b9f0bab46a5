"""Memory-saving gradients for TensorFlow: the same gradients in a fraction of the memory.

``gradients`` replaces ``tf.gradients``; ``patched`` makes unchanged code use it, tapes included;
``memsaving_gradients.keras.MemorySavingGradients`` is a callback for ``fit``; ``checkpoint`` marks
a tensor to keep. ``while_loop`` and ``scan`` are TensorFlow's, with one more argument for replays.
``attention`` and layers in ``keras`` compute attention in blocks. ``plans`` returns the plans of a
graph; ``explain`` and ``largest_batch`` predict memory; ``gradient_error`` measures the error of
an encoding; ``testing.assert_same_gradients`` compares gradients with TensorFlow's, bit by bit.
``python -m memsaving_gradients explain`` explains models from the command line.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:
    # The command line: it reads its arguments and silences TensorFlow's log before TensorFlow is
    # imported.
    from memsaving_gradients.cli import starting

    starting.if_command()

from memsaving_gradients import errors as errors
from memsaving_gradients.analysis.gradient_error import GradientError as GradientError
from memsaving_gradients.analysis.gradient_error import gradient_error as gradient_error
from memsaving_gradients.api import checkpoint as checkpoint
from memsaving_gradients.api import gradients as gradients
from memsaving_gradients.api import gradients_collection as gradients_collection
from memsaving_gradients.api import gradients_memory as gradients_memory
from memsaving_gradients.api import gradients_speed as gradients_speed
from memsaving_gradients.capture.offload import Offload as Offload
from memsaving_gradients.engine.graph_state import plans as plans
from memsaving_gradients.loops import scan as scan
from memsaving_gradients.loops import while_loop as while_loop
from memsaving_gradients.patching import patch as patch
from memsaving_gradients.patching import patched as patched
from memsaving_gradients.patching import unpatch as unpatch
from memsaving_gradients.reports.comparison import Comparison as Comparison
from memsaving_gradients.reports.plan import Decision as Decision
from memsaving_gradients.reports.plan import Plan as Plan
from memsaving_gradients.transforms import attention as attention

if TYPE_CHECKING:
    from memsaving_gradients import keras as keras
    from memsaving_gradients import testing as testing
    from memsaving_gradients.analysis.explain import explain as explain
    from memsaving_gradients.analysis.fitting import fit_to as fit_to
    from memsaving_gradients.analysis.largest_batch import LargestBatch as LargestBatch
    from memsaving_gradients.analysis.largest_batch import largest_batch as largest_batch
    from memsaving_gradients.reports.explanation import Explanation as Explanation
    from memsaving_gradients.training.microbatches.microbatch import microbatch as microbatch

__all__ = [
    "Comparison",
    "Decision",
    "Explanation",
    "GradientError",
    "LargestBatch",
    "Offload",
    "Plan",
    "attention",
    "checkpoint",
    "errors",
    "explain",
    "fit_to",
    "gradient_error",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "keras",
    "largest_batch",
    "microbatch",
    "patch",
    "patched",
    "plans",
    "scan",
    "testing",
    "unpatch",
    "while_loop",
]

__version__ = "0.1.0"


#: The modules of names that are imported on first access: a first step needs none of them, and
#: Keras alone takes seconds to import.
_LATE = {
    "Explanation": "reports.explanation",
    "LargestBatch": "analysis.largest_batch",
    "explain": "analysis.explain",
    "fit_to": "analysis.fitting",
    "keras": "keras",
    "largest_batch": "analysis.largest_batch",
    "microbatch": "training.microbatches",
    "testing": "testing",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_LATE[name]}")
    found = module if name == _LATE[name] else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
