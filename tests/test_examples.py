"""The examples run as their readers run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_long_text():
    """Plain training exceeds the memory there is; ours does not, and learns."""
    command = [sys.executable, EXAMPLES / "long_text.py", "--only", "transformer", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OOM" in done.stdout and "memsaving" in done.stdout
