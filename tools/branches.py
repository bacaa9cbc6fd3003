"""Branches that tests took, of a coverage report in JSON: status 1 under 95%.

python tools/branches.py build/coverage.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

_MIN: Final = 0.95


def share(totals: dict[str, int]) -> float:
    """Of a report's totals."""
    return totals["covered_branches"] / max(1, totals["num_branches"])


def main(file: Path) -> None:
    totals = json.loads(file.read_text())["totals"]
    print(f"branches: {totals['covered_branches']} of {totals['num_branches']}, {share(totals):.1%}")
    sys.exit(f"at least {_MIN:.0%} are wanted" if share(totals) < _MIN else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
