"""`python -m posttrain_cli posttrain_sft.command:COMMAND` writes the option table that an app ships."""

import sys

from posttrain_cli.table import main

if __name__ == "__main__":
    main(sys.argv[1:])
