from __future__ import annotations

import subprocess
import sys


def test_the_search_does_not_import_torch() -> None:
    code = "import sys, export.search.smallest_fp32_set, export.search.table; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
