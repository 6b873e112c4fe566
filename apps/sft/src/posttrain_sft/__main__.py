"""`python -m posttrain_sft ...`, which is also how a launcher starts each of its processes."""

import sys

from posttrain_sft.command import main

sys.exit(main())
