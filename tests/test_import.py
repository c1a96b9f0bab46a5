"""Importing the package takes little beside TensorFlow: what is slow to import is imported when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SLOW = ("matplotlib", "networkx", "ortools", "pandas", "platformdirs", "rich", "scipy", "sklearn")

#: What imports networkx and platformdirs.
LATE = """
import sys
import tensorflow as tf
import graph_tools, graph_tools.cost_cache
with tf.Graph().as_default():
    print(len(graph_tools.capture([tf.compat.v1.placeholder(tf.float32)]).dag))
graph_tools.cost_cache.folder()
print("networkx" in sys.modules, "platformdirs" in sys.modules)
"""


def imported(*packages: str) -> list[str]:
    """The modules that a new process has after importing ``packages``."""
    lines = [f"import {package}" for package in packages]
    code = "; ".join([*lines, "import json, sys", "print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


@pytest.fixture(scope="module")
def added() -> set[str]:
    before, after = imported("tensorflow"), imported("tensorflow", "memsaving_gradients")
    return {*after} - {*before}


def test_the_package_imports_no_library_besides_tensorflow(added):
    assert "memsaving_gradients.planning" in added
    assert not {module.partition(".")[0] for module in added} & {*SLOW}


def test_keras_is_imported_when_it_is_asked_for(added):
    assert "memsaving_gradients.keras" not in added
    assert not [module for module in added if module.partition(".")[0] == "keras"]


def test_what_is_imported_late_is_found():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True", "True"]
