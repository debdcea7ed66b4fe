"""``python -m oxidize_jax`` is the command ``oxidize-jax``."""

import sys

from oxidize_jax.cli import main

sys.exit(main())
