from __future__ import annotations

import subprocess
import sys


def test_the_search_does_not_import_torch() -> None:
    code = "import sys, export.search.smallest_fp32_set, export.search.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
