"""``python -m safe_gpu`` runs the command ``safe-gpu``."""

import sys

from .cli import main

sys.exit(main())
