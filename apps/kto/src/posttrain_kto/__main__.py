"""`python -m posttrain_kto ...`, which is also how a launcher starts each of its processes."""

import sys

from posttrain_kto.command import main

sys.exit(main())
