"""``python -m memsaving_gradients``: see :mod:`memsaving_gradients.cli`."""

import sys

from memsaving_gradients.cli.explaining import main

if __name__ == "__main__":
    sys.exit(main())
