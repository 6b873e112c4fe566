import re
from pathlib import Path


def test_the_example_runs():
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    scope = {"__name__": "readme"}
    exec(compile(blocks[0], "README.md", "exec"), scope)
    assert scope["after"] < scope["before"]
