"""
scripts/download.py for one name after the other, in one process.
"""

import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
import download
from cli.errors import report_errors

results = {}
for name in sys.argv[1:]:
    sys.argv, code = ["download.py", name], 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            report_errors(download.main)
        except SystemExit as stop:
            code = stop.code
    results[name] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
