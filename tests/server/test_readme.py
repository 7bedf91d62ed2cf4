"""The README's Python example runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from laprox_sglang import demo_model

README = Path(__file__).parents[2] / "README.md"


def test_python_example(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    script = tmp_path / "example.py"
    start = "from laprox_sglang import cpu_engine\ncpu_engine.enable()\n"
    example = example.replace("MODEL", str(demo_model.ensure(progress=False)))
    # The pool as the comment in the example says; its default may be more than the test machine has left.
    script.write_text(start + example.replace("page_size=1,", "page_size=1, max_total_tokens=8192,"))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Paris" in run.stdout
