"""The requests that every ledger server is asked, fixed. Expected answers are those of `--policy sglang`.

CROWD      40 prompts of 1 to 6,000 tokens side by side, most of them short
STORM      48 short prompts with long answers: more KV than a small pool has; penalties among them
FEATURES   one request or a few for each thing that SGLang does to a request beside decoding
"""

from __future__ import annotations

import json
import random

from tests.equality.prompts import prompt
from tests.ledger.client import Case

_LENGTHS = (1, 2, 15, 63, 64, 65, 127, 128, 129, 192, 193, 257, 400, 650, 1100, 6000)


def _crowd() -> list[Case]:
    draw = random.Random("crowd")
    lengths = [*_LENGTHS, *(draw.randint(1, 200) for _ in range(40 - len(_LENGTHS)))]
    draw.shuffle(lengths)
    return [Case(f"crowd{i}", tuple(prompt(n, f"ledger/{i}")), 24) for i, n in enumerate(lengths)]


def _storm() -> list[Case]:
    draw = random.Random("storm")
    kinds = {
        1: {"frequency_penalty": 0.6},
        2: {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        4: {"min_new_tokens": 70, "ignore_eos": False, "presence_penalty": 0.2},
    }
    return [
        Case(
            f"storm{i}",
            tuple(prompt(draw.randint(1, 90), f"ledger/storm/{i}")),
            100 if i % 8 in kinds else 160,
            logprobs=i % 8 == 5,
            sampling=kinds.get(i % 8, {}),
        )
        for i in range(48)
    ]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 12}},
    "required": ["a", "b"],
}


def _features() -> list[Case]:
    def case(name: str, length: int, new: int, logprobs: bool = False, **sampling: object) -> Case:
        return Case(name, tuple(prompt(length, f"ledger/{name}")), new, logprobs, sampling)

    made = [case(f"plain{n}", n, 40) for n in (1, 30, 64, 100, 150)]
    made += [case(f"logprobs{n}", n, 24, logprobs=True) for n in (3, 40, 64, 130, 300)]
    made += [
        case("frequency", 50, 60, frequency_penalty=0.7),
        case("presence", 90, 60, presence_penalty=1.1),
        case("repetition", 30, 60, repetition_penalty=1.3),
        case("all penalties", 120, 60, frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.1),
        case("min new", 40, 60, min_new_tokens=30, ignore_eos=False),
        case("regex", 20, 40, regex=r"[0-9]{3}-[a-f]{8}-[A-Z]{10}", ignore_eos=False),
        case("json", 30, 60, json_schema=json.dumps(SCHEMA), ignore_eos=False),
        case("stop", 30, 60, stop=["e", "a"]),
        case("stop id", 30, 60, stop_token_ids=list(range(40, 120))),
        case("none", 70, 0),
        case("one", 70, 1),
    ]
    return made


CROWD = _crowd()
STORM = _storm()
FEATURES = _features()
MANY = Case("many", tuple(prompt(77, "ledger/many")), 30, sampling={"n": 3})


def penalised(case: Case) -> bool:
    """Whether a case's answer depends on which tokens were counted before it.

    NOTE: under the overlap schedule stock's first count is the prompt's last token if the first decode follows the
    prefill at once, else the first output. Only a request alone is sure of the former.
    """
    return "penalty" in str(case.sampling)
