"""`python -m posttrain_dpo ...`, which is also how a launcher starts each of its processes."""

import sys

from posttrain_dpo.command import main

sys.exit(main())
