"""Coverage-guided fuzzing of one target: `python -m tests.fuzz.run NAME CORPUS -max_total_time=60`.

What finds new ways through the code is added to the corpus folder.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["quire_gateway", "quire"]):
        from tests.fuzz.targets import SEEDS, TARGETS

    name, folder, *options = sys.argv[1:]
    corpus = Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *options], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
