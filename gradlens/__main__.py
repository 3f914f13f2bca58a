"""``python -m gradlens``."""

import sys

from gradlens.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
