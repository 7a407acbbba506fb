"""A byte-complete byte-level BPE of 512 tokens, its files and the chat template.

    ids   0 .. 255   the 256 bytes, id = byte value
    ids 256 .. 479   224 pairs of letters (and of a space and a letter)
    ids 480 .. 511   special tokens

Every byte is a token, so every text has ids and every list of ids below 480 has bytes.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIALS: tuple[str, ...] = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "/nothink",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
BYTES = 256
SPECIAL_START = 480
VOCAB_SIZE = 512

PAD = BOS = SPECIAL_START + SPECIALS.index("<|endoftext|>")
EOS: tuple[int, ...] = tuple(
    SPECIAL_START + SPECIALS.index(s) for s in ("<|endoftext|>", "<|user|>", "<|observation|>")
)

_FIRST = "tsaoiwcbpfdmhrelngu"  # letters that begin a pair, most frequent openings of English words first
_SECOND = "heoairtnslu"

_CHAT_TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>
You may call these functions, each a JSON schema on its own line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
{%- endif %}
{%- for message in messages %}
{%- if message.content is string %}{% set text = message.content %}
{%- else %}{% set parts = namespace(text='') %}
{%- for part in message.content or [] %}
{%- if part.type == 'text' %}{% set parts.text = parts.text + part.text %}{% endif %}
{%- endfor %}{% set text = parts.text %}
{%- endif %}
{%- if message.role == 'system' %}<|system|>
{{ text }}
{%- elif message.role == 'user' %}<|user|>
{{ text }}
{%- elif message.role == 'assistant' %}<|assistant|>
<think></think>
{{ text }}
{%- for call in message.tool_calls or [] %}{% set fn = call.function or call %}
<tool_call>{{ fn.name }}
{%- for key, value in (fn.arguments or {}).items() %}<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}<|observation|>
<tool_response>{{ text }}</tool_response>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking %}<think>{% else %}<think></think>{% endif %}
{% endif %}"""


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each of the 256 bytes, in byte order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in keep}
    for n, b in enumerate(b for b in range(BYTES) if b not in letters):
        letters[b] = chr(BYTES + n)
    return [letters[b] for b in range(BYTES)]


def pairs() -> list[tuple[str, str]]:
    """The 224 merges, in rank order: a space and a letter, then two letters."""
    space = byte_letters()[ord(" ")]
    found = [(space, c) for c in "tasoiwcbpfdmhrelngu"]
    found += [(a, b) for a in _FIRST for b in _SECOND]
    return found[: SPECIAL_START - BYTES]


def vocabulary() -> dict[str, int]:
    """Token text (in byte letters) to id, without the special tokens: 480 entries."""
    texts = byte_letters() + [a + b for a, b in pairs()]
    vocab = {text: i for i, text in enumerate(texts)}
    if len(vocab) != SPECIAL_START:
        raise AssertionError(f"vocabulary holds {len(vocab)} distinct tokens, wanted {SPECIAL_START}")
    return vocab


def printable() -> list[int]:
    """Ids of tokens made of printable ASCII: the 95 single letters, then the 224 pairs."""
    return [*range(32, 127), *range(BYTES, SPECIAL_START)]


def build() -> Tokenizer:
    """The tokenizer itself."""
    tok = Tokenizer(models.BPE(vocab=vocabulary(), merges=pairs()))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_texts()])
    return tok


def special_texts() -> list[str]:
    """The 32 special tokens in id order; those without a use are reserved."""
    spare = VOCAB_SIZE - SPECIAL_START - len(SPECIALS)
    return [*SPECIALS, *(f"<|reserved_{n}|>" for n in range(spare))]


def chat_template() -> str:
    """The chat template (Jinja), roles and special tokens as the GLM family names them."""
    return _CHAT_TEMPLATE


def tokenizer_config(context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[0],
        "additional_special_tokens": list(SPECIALS[1:]),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": chat_template(),
    }
