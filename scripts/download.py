"""
Fetch a checkpoint from the Hub ahead of time: the files that generate.py reads
and no others, into the Hub's own cache.

    python scripts/download.py HuggingFaceTB/SmolLM2-135M-Instruct
"""

import signal

if __name__ == "__main__":
    # PyTorch takes seconds to import; Ctrl-C ends that at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from cli.errors import report_errors
from cli.options import Parser
from hub.vet import find_checkpoint


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoint", help="a Hub id, owner/name; gated ones need `hf auth login` first"
    )
    print(find_checkpoint(parser.parse_args().checkpoint))


if __name__ == "__main__":
    report_errors(main)
