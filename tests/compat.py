"""Run the core suite in environments with versions of their own, as ``make test-compat`` does.

    python tests/compat.py [--workers 2] [--only keras/callback,promises/exact_xla] ENVIRONMENT ...

The core suite is what other versions of TensorFlow, Keras or NumPy can break: gradients to the last
bit, edits of graphs while TensorFlow builds them, Keras' training, and measured memory. The rest,
planners, reports and the command line, is in ``make test``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: The test files, by room, and two modules whose doctests show the first steps of users.
CORE = tuple(
    f"{room}/{name}"
    for room, names in {
        "project": "versions allocation_trace",
        "promises": (
            "exact_dtypes exact_second_order exact_constructs exact_models exact_training exact_xla"
            " distribution"
        ),
        "transforms": (
            "loops loops_effects loops_forms loops_variables loops_keras loops_keras_fit"
            " attention_layers"
        ),
        "graph_tools": "capture measure profiles op_types variables",
        "planners": "short_sums budgets",
        "engine": "patching patching_blocks marks whole_step",
        "rewriting": "optimizer_ops offload",
        "keras": "callback callback_budgets callback_limits callback_variables",
        "training": (
            "microbatch microbatch_exact microbatch_keras precision precision_keras sparsity"
            " sparsity_models sparsity_saving"
        ),
        "capture": "encodings",
    }.items()
    for name in names.split()
)
DOCTESTS = ("memsaving_gradients/api.py", "memsaving_gradients/keras.py")

_VERSIONS = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy, tensorflow
print(f"TensorFlow {tensorflow.__version__}, Keras {keras.__version__}, NumPy {numpy.__version__}, "
      f"Python {sys.version_info[0]}.{sys.version_info[1]}")
"""


def main() -> int:
    """Run all environments and print one line about each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environments", nargs="+", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--workers", default="2", help="processes of pytest (default: 2)")
    parser.add_argument("--only", metavar="NAMES", help="some files of the suite, by commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else CORE
    if unknown := sorted({*names} - {*CORE}):
        parser.error(f"{', '.join(unknown)}: not in the core suite, which is {', '.join(CORE)}")
    paths = (f"tests/{name.replace('/', '/test_')}.py" for name in names)
    files = [*paths, *(() if options.only else DOCTESTS)]
    results = [_tried(one, files, options.workers) for one in options.environments]
    print()
    for line, _ in results:
        print(line)
    return 0 if all(passed for _, passed in results) else 1


def _tried(environment: Path, files: list[str], workers: str) -> tuple[str, bool]:
    """Return a line about one environment, and whether all tests have passed."""
    python = environment.absolute() / "bin" / "python"
    versions = subprocess.run(
        [python, "-c", _VERSIONS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()
    if not versions:
        return f"{environment.name}: failed: TensorFlow or Keras cannot be imported", False
    print(f"\n{environment.name}: {versions}", flush=True)
    command = [python, "-m", "pytest", "-m", "not slow", "-n", workers, "--dist", "worksteal", "-q"]
    run = subprocess.Popen([*command, *files], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    last = ""
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    passed = run.wait() == 0
    outcome = "passed" if passed else "FAILED"
    return f"{environment.name}: {versions}: {outcome}: {last.strip('= ')}", passed


if __name__ == "__main__":
    sys.exit(main())
