"""
Write tests/chats/FAMILY.json: what transformers makes of each conversation (messages and a
template's options) of conversations.json with FAMILY.jinja, or why it refuses. The templates are
written for these tests, in the manner of the family's own. Run once, with transformers 5.24.

    pip install transformers==5.24 && PYTHONPATH=.:tests python tests/makers/make_chat_golden.py
"""

import json
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from helpers import CHATS, read_json, with_json


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict], options: dict) -> dict:
    render = tokenizer.apply_chat_template
    try:
        text, tokens = (
            render(
                messages,
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
                **options,
            )
            for tokenize in (False, True)
        )
        return dict(text=text, tokens=tokens)
    except TemplateError as error:
        return dict(refused=str(error))


def main() -> None:
    with TemporaryDirectory() as directory:
        with_json(Path(directory))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    for path in CHATS.glob("*.jinja"):
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        found = [rendered(tokenizer, *of) for of in read_json(CHATS / "conversations.json")]
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
        path.with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    with patch("transformers.utils.chat_template_utils.datetime") as clock:
        clock.now.return_value = datetime(2026, 2, 1)
        main()
