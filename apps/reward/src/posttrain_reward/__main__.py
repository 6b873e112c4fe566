"""`python -m posttrain_reward ...`, which is also how a launcher starts each of its processes."""

import sys

from posttrain_reward.command import main

sys.exit(main())
