"""
Write tests/golden_resolved.json: what transformers makes of the config.json files of
judge.cases(), where it reads them. Run once; written with transformers 5.24.

    pip install transformers==5.24 && python tests/makers/make_resolved.py
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
from judge import by_transformers, cases  # noqa: E402

if __name__ == "__main__":
    found = {}
    for name, hf in cases().items():
        with suppress(Exception):  # many kinds; each means that it does not read the file
            found[name] = by_transformers(hf)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in found.items())
    (Path(__file__).parents[1] / "golden_resolved.json").write_text(f"{{\n{lines}\n}}\n")
