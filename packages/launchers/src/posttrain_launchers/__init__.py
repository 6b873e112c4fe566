"""From one command line to one process an accelerator."""
