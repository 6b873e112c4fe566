"""What holds for every test of the workspace. `tools/alone.py` sets the same when it tests a member by itself."""

import os

# Before torch is imported: workers of `pytest -n 2` would otherwise start as many threads each as there are cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test downloads anything; a hub name that is not cached fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
