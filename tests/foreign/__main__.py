"""Run the tests that Keras ships, plain and with gradients that recompute (``make test-foreign``).

    python -m tests.foreign [--workers 2] [--only layers/rnn] [--modes recompute,budget] [--results
    FOLDER]

A run continues where it was stopped: it repeats only results of other versions, or of another state
of this library. Further modes of ``--modes`` leave out tests that asked for no gradients in the
first. A test that fails, but passes plain, is tried once more in another process, and counts if it
fails again. The exit code is 1 if no limit explains such a failure (`tests.foreign.known`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.foreign import processes, results, suite, verdict
from tests.foreign.modes import MODES, PATCHED, PLAIN
from tests.foreign.results import Result
from tests.foreign.verdict import Failure


@dataclass(frozen=True)
class Run:
    """Files of tests below ``root``, whose results are kept in ``cache``."""

    root: Path
    cache: Path

    def file(self, file: Path, modes: Iterable[str]) -> str:
        """Run the tests of one file that have no results yet, and return a line for each mode."""
        name = file.relative_to(self.root)
        lines = []
        patched: dict[str, Result] = {}
        for mode in modes:
            tests = [str(file)]
            if patched and not (tests := verdict.differentiating(patched)):
                lines.append(f"{mode:9} {name}: no test asks for gradients")
                continue
            written = self._written(file, mode)
            results.begin(written, suite.key_of(mode))
            processes.run_tests(tests, self.root, mode, written)
            found = results.read(written)
            if mode != PLAIN:
                patched = patched or found
            passed = sum(one.outcome == "passed" for one in found.values())
            rewired = sum(one.rewired for one in found.values())
            lines.append(
                f"{mode:9} {name}: {passed} of {len(found)} passed, {rewired} gradients rewired"
                if found
                else f"{mode:9} {name}: no tests; see {written.with_suffix('.log')}"
            )
        return "\n".join(lines)

    def found(self, files: Iterable[Path], modes: Iterable[str]) -> dict[str, dict[str, Result]]:
        """Return all results, by mode and by name."""
        return {
            mode: {
                test: result
                for file in files
                for test, result in results.read(self._written(file, mode)).items()
            }
            for mode in modes
        }

    def again(self, mode: str, failed: Sequence[Failure]) -> None:
        """Try tests of one file once more, in a process of their own; the new results count."""
        file = self.root / failed[0].test.partition("::")[0]
        written = self._written(file, mode)
        alone = written.with_suffix(".again.jsonl")
        alone.unlink(missing_ok=True)
        results.begin(alone, suite.key_of(mode))
        processes.run_tests([one.test for one in failed], self.root, mode, alone)
        for test, result in results.read(alone).items():
            results.note(written, test, result)

    def _written(self, file: Path, mode: str) -> Path:
        return suite.written_to(self.cache, self.root, file, mode)


def main() -> int:
    """Run all tests, print the verdict, and return the exit code."""
    options = _options()
    root = (options.root or suite.keras_sources()).resolve()
    folders = suite.FOLDERS if options.root is None else (".",)
    files = suite.files_of(root, folders, options.only)
    if not files:
        print(f"no file of tests below {root} has one of these in its name: {options.only}")
        return 2
    run = Run(root, options.results.absolute())
    _set_environment(run.cache)
    modes = [PLAIN, *options.modes]
    with ThreadPoolExecutor(options.workers) as pool:
        for number, lines in enumerate(pool.map(lambda file: run.file(file, modes), files), 1):
            print(f"[{number}/{len(files)}]\n{lines}", flush=True)
        of_files: dict[tuple[str, str], list[Failure]] = {}
        for failure in verdict.failures(run.found(files, modes)):
            print(f"once more: {failure}", flush=True)
            of_files.setdefault((failure.mode, failure.test.partition("::")[0]), []).append(failure)
        list(pool.map(lambda key: run.again(key[0], of_files[key]), of_files))
    found = run.found(files, modes)
    failed = verdict.failures(found)
    print("\n" + verdict.table(found))
    if failed:
        print(f"\n{len(failed)} pass plain only:")
        print("\n".join(map(str, failed)))
    return int(any(not failure.known for failure in failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.foreign", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PART",
        help="files with it in their names; may be given several times",
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        default=PATCHED,
        help=f"some of {', '.join(PATCHED)}, by commas, beside plain (default: all)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(".foreign"),
        metavar="FOLDER",
        help="where results are kept, and looked for (default: .foreign)",
    )
    parser.add_argument(
        "--root", type=Path, metavar="FOLDER", help="tests of somebody else (default: of Keras)"
    )
    return parser.parse_args()


def _modes(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := sorted({*asked} - {*MODES}):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(MODES)}")
    return [mode for mode in asked if mode != PLAIN]


def _set_environment(cache: Path) -> None:
    """Set the environment of the processes: Keras on TensorFlow, without the settings and data of a
    user, and a path to this library."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["KERAS_HOME"] = str(cache / "keras")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    paths = [str(suite.LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


if __name__ == "__main__":
    sys.exit(main())
