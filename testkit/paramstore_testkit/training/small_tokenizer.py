"""A tokenizer for small models, made on the spot: a token for each printable character of ASCII, and numbered ones up to the
vocabulary's end."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""That of Qwen3 without its tools: transformers' server looks for its marks in what such a model says."""
FIRST_PRINTABLE, LAST_PRINTABLE = 32, 126
END = "<end>"


def save_tokenizer(directory: Path, *, vocabulary: int = 128, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Puts a tokenizer of `vocabulary` tokens, at least 97, beside the checkpoint in `directory`. No text has its last one,
    `<end>`."""
    letters = [*map(chr, range(FIRST_PRINTABLE, LAST_PRINTABLE + 1)), "\n"]
    mapped = {letter: pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(letter)[0][0] for letter in letters}
    words = [*mapped.values(), *(f"~{number}" for number in range(len(mapped), vocabulary - 1)), END]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)  # type: ignore[no-untyped-call]
    made.chat_template = chat_template
    made.save_pretrained(directory)
