"""`sampling_params`: every key, its type and the range in which the scheduler's int32 and float32 tensors hold.

| keys                                            | bound                                                            |
|-------------------------------------------------|------------------------------------------------------------------|
| max_new_tokens, min_new_tokens, stream_interval | 0 (interval: 1) to 2**31 - 1, min <= max; context: `prompt.py`   |
| n, beam_width                                   | 1 to --guard-max-n                                               |
| temperature                                     | 0 to 1e6; below 1e-6 is greedy                                   |
| top_p, min_p                                    | above 0 (min_p: from 0) to 1                                     |
| top_k                                           | -1 (all) or 1 to 2**31 - 1                                       |
| frequency_penalty, presence_penalty             | -2 to 2                                                          |
| repetition_penalty                              | 0.001 to 2: smaller ones overflow float32 logits                 |
| sampling_seed                                   | int64                                                            |
| logit_bias                                      | decimal token ids of the vocabulary -> -1e4 to 1e4               |
| stop, stop_token_ids, stop_regex                | `stops.py`                                                       |
| json_schema, regex, ebnf, structural_tag        | at most one; `grammar.py`                                        |
| custom_params                                   | as SGLang's wire carries it: scalars, lists and dicts of scalars |

A key that is not here is refused: SGLang's internal fields are not for clients. None stands for "not given", but for
`n`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from glm_runtime.guard import grammar, stops
from glm_runtime.guard.kinds import Check, flag, real, text, whole
from glm_runtime.guard.limits import INT32, INT64, Limits
from glm_runtime.guard.refusal import Refusal

MAX_CUSTOM = 1024  # entries of custom_params and of a list or dict in it
MAX_CUSTOM_TEXT = 65536  # characters of one string in it

RANGES: Mapping[str, Check] = {
    "max_new_tokens": partial(whole, least=0, most=INT32),
    "min_new_tokens": partial(whole, least=0, most=INT32),
    "stream_interval": partial(whole, least=1, most=INT32),
    "temperature": partial(real, least=0.0, most=1e6),
    "top_p": partial(real, least=0.0, most=1.0, above=True),
    "min_p": partial(real, least=0.0, most=1.0),
    "frequency_penalty": partial(real, least=-2.0, most=2.0),
    "presence_penalty": partial(real, least=-2.0, most=2.0),
    "repetition_penalty": partial(real, least=0.001, most=2.0),
    "sampling_seed": partial(whole, least=-INT64 - 1, most=INT64),
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "ebnf_full_assistant": flag,
}


def check(name: str, params: Any, limits: Limits) -> None:
    """One prompt's sampling parameters; `name` is where they stand ("sampling_params" or with an index)."""
    if not isinstance(params, Mapping):
        raise Refusal(name, params, "an object of sampling parameters")
    for key, value in params.items():
        if not isinstance(key, str):
            raise Refusal(name, key, "names of sampling parameters as keys")
        if key == "n":
            whole("n", value, 1, limits.flags.guard_max_n)
        elif value is None:
            if key not in KNOWN:
                raise Refusal(key, value, "a sampling parameter's name")
        elif key in RANGES:
            RANGES[key](key, value)
        elif key in OTHERS:
            OTHERS[key](key, value, limits)
        else:
            raise Refusal(key, value, "a sampling parameter's name")
    least, most = params.get("min_new_tokens"), params.get("max_new_tokens")
    if least is not None and most is not None and least > most:
        raise Refusal("min_new_tokens", least, f"at most max_new_tokens {most}")
    width, n = params.get("beam_width"), params.get("n")
    if width is not None and width > 1 and n is not None and n > width:
        raise Refusal("n", n, f"at most beam_width {width}")
    grammar.only_one(params)


def _beam_width(name: str, value: Any, limits: Limits) -> None:
    whole(name, value, 1, limits.flags.guard_max_n)


def _top_k(name: str, value: Any, limits: Limits) -> None:
    if type(value) is not int or not (value == -1 or 1 <= value <= INT32):
        raise Refusal(name, value, f"-1 or a whole number from 1 to {INT32}")


def _logit_bias(name: str, value: Any, limits: Limits) -> None:
    if not isinstance(value, Mapping):
        raise Refusal(name, value, "an object of token ids and biases")
    if len(value) > limits.flags.guard_max_list:
        raise Refusal(name, f"{len(value)} entries", f"at most {limits.flags.guard_max_list} entries")
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        if not digits or int(key) >= limits.vocab:
            raise Refusal(f"{name} key", key, f"a token id from 0 to {limits.vocab - 1} in decimal digits")
        real(f"{name}[{key}]", bias, -1e4, 1e4)


def _scalar(name: str, value: Any) -> None:
    if isinstance(value, str):
        text(name, value, MAX_CUSTOM_TEXT)
    elif type(value) is int:
        whole(name, value, -INT64 - 1, INT64)
    elif type(value) is float:
        real(name, value, -1.7976931348623157e308, 1.7976931348623157e308)
    elif value is not None and type(value) is not bool:
        raise Refusal(name, value, "a string, number, true, false or null")


def _custom_params(name: str, value: Any, limits: Limits) -> None:
    if not isinstance(value, Mapping):
        raise Refusal(name, value, "an object")
    parts = sum(len(entry) for entry in value.values() if isinstance(entry, list | tuple | dict))
    if len(value) + parts > MAX_CUSTOM:
        raise Refusal(name, f"{len(value) + parts} entries", f"at most {MAX_CUSTOM} entries")
    for key, entry in value.items():
        text(f"{name} key", key, 256, 1)
        if isinstance(entry, list | tuple):
            for i, part in enumerate(entry):
                _scalar(f"{name}.{key}[{i}]", part)
        elif isinstance(entry, Mapping):
            for inner, part in entry.items():
                text(f"{name}.{key} key", inner, 256)
                _scalar(f"{name}.{key}.{inner}", part)
        else:
            _scalar(f"{name}.{key}", entry)
    budget = value.get("thinking_budget")
    if budget is not None:
        whole(f"{name}.thinking_budget", budget, 0, INT32)


def _watermark(name: str, value: Any, limits: Limits) -> None:
    if isinstance(value, Mapping):
        _custom_params(name, value, limits)


OTHERS = {
    "beam_width": _beam_width,
    "top_k": _top_k,
    "logit_bias": _logit_bias,
    "custom_params": _custom_params,
    "watermark": _watermark,
    "stop": stops.strings,
    "stop_token_ids": stops.token_ids,
    "stop_regex": stops.patterns,
    "json_schema": grammar.json_schema,
    "regex": grammar.regex,
    "ebnf": grammar.plain,
    "structural_tag": grammar.structural_tag,
}
KNOWN = frozenset(RANGES) | frozenset(OTHERS)
