"""The guard's table: what passes, what is refused and under which name. No server."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_runtime.guard import Limits, Refusal, check

LIMITS = Limits(vocab=512, context=1024, hidden=4, labels=frozenset({"a"}))


def request(**fields: Any) -> SimpleNamespace:
    """A generate request with a prompt, unless `fields` has one."""
    prompt = {} if {"text", "input_ids", "input_embeds"} & set(fields) else {"input_ids": [1, 2, 3]}
    return SimpleNamespace(**(prompt | fields))


def refused(obj: Any) -> Refusal:
    """The refusal of `obj`, its JSON form checked."""
    with pytest.raises(Refusal) as raised:
        check(obj, LIMITS)
    error = json.loads(json.dumps(raised.value.as_dict(), allow_nan=False))["error"]
    assert set(error) == {"message", "field", "value", "bound"}
    assert error["field"] in error["message"] and error["bound"] in error["message"]
    assert "\n" not in error["message"]
    return raised.value


def params(**sampling: Any) -> SimpleNamespace:
    return request(sampling_params=sampling)


FINE = [
    request(),
    request(text="hello"),
    request(text=["a", "b"], sampling_params=[{"n": 2}, {"n": 2}]),
    request(input_ids=[[0], [511]], rid=["a", "b"], top_logprobs_num=[0, 5], return_logprob=[True, False]),
    request(input_ids=[[0], [511]], rid="a", extra_key=["x", None]),
    request(input_ids=[], session_params={"id": "s", "rid": None}),
    request(input_embeds=[[0.0, 1.0, -1.0, 0.5]]),
    request(image_data=[None], audio_data=[], video_data=None, lora_path=None),
    request(logprob_start_len=-1, token_ids_logprob=[1, 2], priority=-(2**31)),
    request(custom_labels={"a": "x"}),
    params(temperature=0, top_p=1, top_k=-1, min_p=0, n=128, max_new_tokens=0, stop=["x"], stop_token_ids=[1, None]),
    params(temperature=None, top_k=None, stop=None, json_schema=None, regex="", logit_bias={"5": -100, "511": 1.5}),
    params(json_schema='{"type": "object"}', custom_params={"a": 1, "b": [1, "x"], "c": {"d": None}}),
    params(stop_regex=[r"\d{5}", r"[a-z]{1,64}\n", "(foo|bar){1,3}"], sampling_seed=-(2**63)),
    params(beam_width=4, n=4),
]


@pytest.mark.parametrize("obj", FINE)
def test_fine(obj: Any) -> None:
    check(obj, LIMITS)


NAN = float("nan")
REFUSED: list[tuple[str, Any]] = [
    ("text", SimpleNamespace()),
    ("text", request(text="")),
    ("text[1]", request(text=["a", ""])),
    ("text", request(text=[])),
    ("text", request(text="\ud800")),
    ("text", request(text=5)),
    ("input_ids", request(input_ids=[])),
    ("input_ids[0]", request(input_ids=[[]])),
    ("input_ids[1]", request(input_ids=[[1], 2])),
    ("input_ids[0]", request(input_ids=[512])),
    ("input_ids[1]", request(input_ids=[0, -1])),
    ("input_ids[0]", request(input_ids=[2**40])),
    ("input_ids[0]", request(input_ids=[1.0])),
    ("input_ids[0]", request(input_ids=[True])),
    ("input_ids[0]", request(input_ids=["1"])),
    ("input_ids[1][0]", request(input_ids=[[1], [512]])),
    ("input_ids", request(input_ids=[1] * 5000)),
    ("input_ids", request(input_ids={"a": 1})),
    ("input_ids", request(text=["a", "b"], input_ids=[[1]])),
    ("input_embeds[0]", request(input_embeds=[[0.0]])),
    ("input_embeds[0][3]", request(input_embeds=[[0.0, 0.0, 0.0, NAN]])),
    ("top_logprobs_num", request(top_logprobs_num=513)),
    ("top_logprobs_num", request(top_logprobs_num=10**9)),
    ("top_logprobs_num", request(top_logprobs_num=-1)),
    ("top_logprobs_num", request(top_logprobs_num=True)),
    ("top_logprobs_num", request(top_logprobs_num=[1])),
    ("top_logprobs_num[1]", request(text=["a", "b"], top_logprobs_num=[1, 257])),
    ("token_ids_logprob[0]", request(token_ids_logprob=[512])),
    ("token_ids_logprob", request(token_ids_logprob=[[1]])),
    ("logprob_start_len", request(logprob_start_len=-5)),
    ("logprob_start_len", request(logprob_start_len=1.0)),
    ("return_logprob", request(return_logprob=1)),
    ("priority", request(priority=2**31)),
    ("priority", request(priority=True)),
    ("rid", request(rid="")),
    ("rid", request(rid=["a"])),
    ("rid", request(rid=5)),
    ("rid", request(text=["a", "b"], rid=["x", "x"])),
    ("image_data", request(image_data="http://x/y.png")),
    ("audio_data", request(audio_data=[["x"]])),
    ("lora_id", request(lora_id="x")),
    ("http_worker_ipc", request(http_worker_ipc="ipc:///x")),
    ("positional_embed_overrides", request(positional_embed_overrides={"embeds": []})),
    ("return_routed_experts", request(return_routed_experts=True)),
    ("session_params.id", request(session_params={"id": 5})),
    ("session_params.bogus", request(session_params={"bogus": 5})),
    ("session_params", request(session_params="x")),
    ("bootstrap_port", request(bootstrap_port=70000)),
    ("bootstrap_room", request(bootstrap_room="x")),
    ("multi_item_delimiter_indices[0]", request(multi_item_delimiter_indices=[-1])),
    ("custom_labels.a", request(custom_labels={"a": 1})),
    ("custom_labels key", request(custom_labels={"b": "x"})),
    ("custom_labels", request(custom_labels=["a"])),
    ("sampling_params", request(sampling_params=5)),
    ("sampling_params", request(sampling_params=[{}])),
    ("sampling_params", request(text=["a", "b"], sampling_params=[{}])),
    ("n", request(text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}])),
    ("n", request(text=["a"] * 100, sampling_params={"n": 100})),
    ("n", params(n=0)),
    ("n", params(n=True)),
    ("n", params(n=None)),
    ("n", params(n=129)),
    ("n", params(beam_width=2, n=3)),
    ("beam_width", params(beam_width=10**9)),
    ("temperature", params(temperature=NAN)),
    ("temperature", params(temperature=math.inf)),
    ("temperature", params(temperature="NaN")),
    ("temperature", params(temperature=-0.1)),
    ("temperature", params(temperature=True)),
    ("top_p", params(top_p=0)),
    ("top_p", params(top_p=1.01)),
    ("min_p", params(min_p=-0.1)),
    ("top_k", params(top_k=10**12)),
    ("top_k", params(top_k=-2)),
    ("top_k", params(top_k=0)),
    ("top_k", params(top_k=1.5)),
    ("repetition_penalty", params(repetition_penalty=1e-300)),
    ("frequency_penalty", params(frequency_penalty=2.1)),
    ("max_new_tokens", params(max_new_tokens=-1)),
    ("max_new_tokens", params(max_new_tokens=2**40)),
    ("max_new_tokens", params(max_new_tokens="5")),
    ("min_new_tokens", params(min_new_tokens=5, max_new_tokens=4)),
    ("sampling_seed", params(sampling_seed=2**63)),
    ("ignore_eos", params(ignore_eos=1)),
    ("logit_bias key", params(logit_bias={"512": 1})),
    ("logit_bias key", params(logit_bias={"-1": 1})),
    ("logit_bias key", params(logit_bias={" 5": 1})),
    ("logit_bias[5]", params(logit_bias={"5": NAN})),
    ("logit_bias[5]", params(logit_bias={"5": "1"})),
    ("logit_bias", params(logit_bias=[1])),
    ("stop", params(stop="")),
    ("stop[0]", params(stop=[5])),
    ("stop", params(stop=["x"] * 33)),
    ("stop_token_ids[0]", params(stop_token_ids=[512])),
    ("stop_token_ids", params(stop_token_ids=[1] * 5000)),
    ("stop_regex", params(stop_regex="(")),
    ("stop_regex", params(stop_regex="a+")),
    ("stop_regex", params(stop_regex="(a{1,9}){1,9}")),
    ("stop_regex", params(stop_regex="a?" * 28 + "a" * 28)),
    ("stop_regex", params(stop_regex="^$")),
    ("stop_regex", params(stop_regex="x" * 300)),
    ("json_schema", params(json_schema="{")),
    ("json_schema", params(json_schema="[1]")),
    ("json_schema", params(json_schema="NaN")),
    ("json_schema", params(json_schema={"type": "object"})),
    ("json_schema", params(json_schema="[" * 100000)),
    ("json_schema", params(json_schema='{"a":' * 100 + "1" + "}" * 100)),
    ("json_schema", params(json_schema=json.dumps({"description": "x" * (1 << 20)}))),
    ("regex", params(json_schema="{}", regex="a")),
    ("structural_tag", params(structural_tag="[]")),
    ("custom_params.a", params(custom_params={"a": 2**63})),
    ("custom_params.a[0]", params(custom_params={"a": [[1]]})),
    ("custom_params.thinking_budget", params(custom_params={"thinking_budget": -1})),
    ("is_normalized", params(is_normalized=True)),
    ("bogus", params(bogus=None)),
]


@pytest.mark.parametrize(("field", "obj"), REFUSED)
def test_refused(field: str, obj: Any) -> None:
    assert refused(obj).field == field


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for _, obj in REFUSED for name in vars(obj)} | {name for obj in FINE for name in vars(obj)})
SAMPLING = sorted(
    {
        name
        for obj in [*FINE, *(obj for _, obj in REFUSED)]
        if isinstance(vars(obj).get("sampling_params"), dict)
        for name in vars(obj)["sampling_params"]
    }
)


@settings(max_examples=300, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    sampling=st.none() | st.dictionaries(st.sampled_from(SAMPLING), JSON, max_size=4),
)
def test_any_value_passes_or_is_refused(fields: dict[str, Any], sampling: dict[str, Any] | None) -> None:
    """Nothing else than a Refusal comes out, and it can be said in JSON."""
    obj = request(**({"sampling_params": sampling} | fields))
    try:
        check(obj, LIMITS)
    except Refusal as refusal:
        json.dumps(refusal.as_dict(), allow_nan=False).encode()
