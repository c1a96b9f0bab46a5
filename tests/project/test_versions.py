"""The oldest supported versions are the same in all files, and older ones are refused."""

from __future__ import annotations

import configparser
import pickle
import re
from pathlib import Path

import pytest

from memsaving_gradients import _keras
from memsaving_gradients.errors import VersionError

ROOT = Path(__file__).parents[2]


def bounds(text: str, sign: str) -> dict[str, str]:
    return dict(re.findall(rf"^(\w+){sign}([\d.]+)$", text, flags=re.MULTILINE))


def test_the_oldest_versions_are_tried() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    least = bounds(setup["options"]["install_requires"], ">=")
    tried = bounds((ROOT / "tests" / "oldest.txt").read_text(), "==")
    assert {"tensorflow", "keras", "numpy"} <= least.keys() <= tried.keys()
    for name, version in least.items():
        assert f"{tried[name]}.".startswith(f"{version}."), name
    assert least["keras"] == _keras.OLDEST


@pytest.mark.parametrize("version", ["2.15.0", "3.2.1"])
def test_an_older_keras_is_refused(version: str) -> None:
    with pytest.raises(
        VersionError, match=rf"Keras {version} is too old: pip .* 'keras>=3\.3'"
    ) as caught:
        _keras.check_version(version)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.library, again.version, again.oldest) == ("Keras", version, "3.3")


@pytest.mark.parametrize("version", ["3.3.0", "3.15.1", "4.0.0.dev1"])
def test_a_newer_one_is_not(version: str) -> None:
    _keras.check_version(version)
