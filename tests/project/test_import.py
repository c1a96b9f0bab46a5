"""Importing the package takes little more than TensorFlow: slow modules are imported when they are
used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from graph_tools.costs.cache import ENVIRONMENT

SLOW = ("matplotlib", "networkx", "ortools", "pandas", "platformdirs", "rich", "scipy", "sklearn")

#: Imports TensorFlow, then the package, and uses functions that import networkx and platformdirs.
PROGRAM = """
import json, sys
import tensorflow as tf
before = {*sys.modules}
import memsaving_gradients
added = {*sys.modules} - before
import graph_tools, graph_tools.costs.cache
with tf.Graph().as_default():
    ops = len(graph_tools.capture([tf.compat.v1.placeholder(tf.float32)]).dag)
graph_tools.costs.cache.folder()
late = ["networkx" in sys.modules, "platformdirs" in sys.modules]
print(json.dumps({"added": sorted(added), "ops": ops, "late": late}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the modules that a new process has imported."""
    # If the environment names a folder for costs, the package does not look for the user's folder.
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_the_package_imports_no_library_besides_tensorflow(found):
    assert "memsaving_gradients.engine.planning.within_limits" in found["added"]
    assert not {module.partition(".")[0] for module in found["added"]} & {*SLOW}


def test_keras_is_imported_when_it_is_asked_for(found):
    assert "memsaving_gradients.keras" not in found["added"]
    assert not [module for module in found["added"] if module.partition(".")[0] == "keras"]


def test_what_is_imported_late_is_found(found):
    assert found["ops"] == 1 and found["late"] == [True, True]


def test_importing_the_package_imports_no_figures_and_no_command_line(found):
    late = (
        "reports.figures",
        "reports.frames",
        "reports.web.page",
        "reports.events",
        ".cli",
        ".analysis.explain",
    )
    assert not [module for module in found["added"] if any(part in module for part in late)]
