"""Markdown is counted outside code, and tokens by whoever is said to count them."""

import sys
from types import SimpleNamespace

from policy.answer_style import markdown_counts, token_counter
from segrew.chat import ChatFormat
from segrew.language_models import load_tokenizer

TEXT = """# Title
## Part
text with **bold** and __also__ and **more**
- one
  * two
+ three
1. first
 12. twelfth
#no header
```
# comment
- not a list
**not bold**
```
"""


def test_markdown_outside_code_blocks_is_counted():
    counts = markdown_counts(TEXT)
    assert counts["header_count"] == {"h1": 1, "h2": 1, "h3": 0, "h4": 0, "h5": 0, "h6": 0}
    assert counts["list_count"] == {"ordered": 2, "unordered": 3}
    assert counts["bold_count"] == {"**": 2, "__": 1}


def test_tokens_are_the_policys_own_unless_gpt4os_are_at_hand(monkeypatch, tmp_path, policy_dir):
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir)))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    encoding = SimpleNamespace(encode=lambda text, disallowed_special: text.split())
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(encoding_for_model=lambda name: encoding, __spec__=1))
    count, name = token_counter(chat)
    assert count("two words") == 9 and str(policy_dir) in name  # a byte each, no stop token
    (tmp_path / "fb374d419588a4632f3f557e76b4b70aebbca790").touch()
    count, name = token_counter(chat)
    assert count("two words") == 2 and name == "gpt-4o (tiktoken)"
