"""Random requests for every endpoint of the server: a sound body, with a few fields made odd.

A body that stays sound asks for a few tokens only. `abort_all` is left out: it is meant to end the neighbours.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"max_new_tokens": 3, "temperature": 0}
SOUND: dict[str, Json] = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": GREEDY},
    "/generate?text": {"text": "hello", "sampling_params": GREEDY},
    "/generate?batch": {"text": ["hello", "you"], "sampling_params": GREEDY | {"n": 2}},
    "/v1/completions": {"model": "m", "prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 3, "store": False},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
    "/api/chat": {"model": "m", "messages": MESSAGES, "options": {"num_predict": 3}},
    "/api/generate": {"model": "m", "prompt": "hello", "options": {"num_predict": 3}},
    "/invocations": {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    "/vertex_generate": {"instances": [{"text": "hello"}], "parameters": {"sampling_params": GREEDY}},
    "/encode": {"text": "hello"},
    "/classify": {"text": "hello"},
    "/v1/embeddings": {"model": "m", "input": "hello"},
    "/v1/classify": {"model": "m", "input": "hello"},
    "/v1/score": {"model": "m", "query": "hello", "items": ["a"], "label_token_ids": [1, 2]},
    "/v1/rerank": {"query": "hello", "documents": ["a"]},
    "/v1/decisions": {"model": "m", "input": "hello", "questions": []},
    "/v1/tokenize": {"model": "m", "prompt": "hello"},
    "/v1/detokenize": {"model": "m", "tokens": [5, 6]},
    "/open_session": {"capacity_of_str_len": 1000},
    "/close_session": {"session_id": "none"},
    "/abort_request": {"rid": "none"},
    "/parse_function_call": {"text": "hello", "tools": [], "tool_call_parser": "glm"},
    "/separate_reasoning": {"text": "hello", "reasoning_parser": "glm45"},
}
STREAMS = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
SAMPLING = """
    temperature top_p top_k min_p n stop stop_token_ids stop_regex frequency_penalty presence_penalty seed
    repetition_penalty min_new_tokens max_new_tokens json_schema regex ebnf structural_tag logit_bias ignore_eos
    skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval sampling_seed custom_params
    beam_width watermark num_predict bogus
""".split()  # noqa: SIM905, one name a line would be three screens
FIELDS = """
    text input_ids input_embeds sampling_params return_logprob logprob_start_len top_logprobs_num
    token_ids_logprob rid priority stream session_params session_id lora_path custom_logit_processor
    bootstrap_host bootstrap_port bootstrap_room return_hidden_states return_routed_experts return_indexer_topk
    image_data audio_data modalities extra_key cache_salt background data_parallel_rank routed_dp_rank
    return_sampling_mask sampling_logprobs_mode return_text_in_logprobs multi_item_delimiter_indices
    token_indices_to_pool positional_embed_overrides kv_hints http_worker_ipc lora_id custom_labels
    max_thinking_tokens require_reasoning return_prompt_token_ids return_entropy prompt messages model
    max_tokens logprobs top_logprobs echo suffix best_of user tools tool_choice response_format stream_options
    reasoning_effort chat_template_kwargs min_tokens input instructions max_output_tokens max_completion_tokens
    previous_response_id reasoning tool_resources system metadata thinking options format keep_alive template
    raw context images instances parameters items query label_token_ids apply_softmax item_first documents
    tokens add_special_tokens capacity_of_str_len timeout streaming text_offset include parallel_tool_calls
""".split()  # noqa: SIM905, one name a line would be three screens

texts = st.sampled_from(
    [
        "",
        "a",
        "NaN",
        "x" * 5000,
        "\u0000",
        "é😀",
        "(",
        "a+",
        "(a|aa)*$",
        "{",
        '{"type":"object"}',
        '{"$ref":"#"}',
        "root ::= root",
    ]
)
numbers = st.sampled_from(
    [
        0,
        1,
        2,
        3,
        -1,
        -2,
        -5,
        511,
        512,
        513,
        2**31 - 1,
        2**31,
        2**40,
        2**63 - 1,
        -(2**63),
        0.0,
        0.5,
        -0.5,
        1.5,
        1e-300,
        1e300,
        10**12,
    ]
)
plain = st.none() | st.booleans() | numbers | texts
odd = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "id", "content", "name", "function", "5", "511", "512", "a"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Path and body of one request."""
    name = draw(st.sampled_from(sorted(SOUND)))
    path = name.partition("?")[0]
    body = json.loads(json.dumps(SOUND[name]))
    if path in STREAMS and draw(st.booleans()):
        body["stream"] = True
    places = [body]
    for inner in ("sampling_params", "options", "parameters"):
        if isinstance(body.get(inner), dict):
            places.append(body[inner])
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(places))
        field = draw(st.sampled_from(FIELDS + SAMPLING + sorted(body)) if place is body else st.sampled_from(SAMPLING))
        place[field] = draw(odd)
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        data = data.replace(
            b"3", draw(st.sampled_from([b"NaN", b"-Infinity", b"1e400", b"3" * 400, b'"\\ud800"', b"\xff"]))
        )
    return path, data
