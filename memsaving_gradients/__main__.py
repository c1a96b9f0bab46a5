"""``python -m memsaving_gradients``: see :mod:`memsaving_gradients.command`."""

import sys

from memsaving_gradients.command.explaining import main

if __name__ == "__main__":
    sys.exit(main())
