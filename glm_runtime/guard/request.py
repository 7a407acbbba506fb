"""A whole request, before anything is computed for it: one row a field of SGLang's GenerateReqInput.

Fields that SGLang fills in itself (`lora_id`, `http_worker_ipc`, ...) are refused when a client sends them. A
field that is not in the table belongs to a newer SGLang and is let through.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from glm_runtime.guard import sampling
from glm_runtime.guard.kinds import Check, absent, flag, ids, optional, real, sequence, text, whole
from glm_runtime.guard.limits import INT32, INT64, Limits
from glm_runtime.guard.refusal import Refusal

MAX_NAME = 512  # characters of a request id, key, host or adapter name
INTERNAL = "SGLang sets it"

name_text = partial(text, most=MAX_NAME)
PLAIN: Mapping[str, Check] = {
    "session_id": partial(text, most=MAX_NAME, least=1),
    "use_audio_in_video": flag,
    "return_text_in_logprobs": flag,
    "return_flat_raw_top_logprobs": flag,
    "return_flat_raw_output_top_logprobs": flag,
    "return_flat_raw_top_logprobs_b64": flag,
    "stream": flag,
    "log_metrics": flag,
    "return_routed_experts": flag,
    "return_indexer_topk": flag,
    "background": flag,
    "require_reasoning": flag,
    "no_logs": flag,
    "return_bytes": flag,
    "return_entropy": flag,
    "return_prompt_token_ids": flag,
    "routed_experts_start_len": partial(whole, least=0, most=INT32),
    "routed_dp_rank": partial(whole, least=0, most=INT32),
    "data_parallel_rank": partial(whole, least=0, most=INT32),
    "disagg_prefill_dp_rank": partial(whole, least=0, most=INT32),
    "max_thinking_tokens": partial(whole, least=0, most=INT32),
    "priority": partial(whole, least=-INT32 - 1, most=INT32),
    "received_time": partial(real, least=0.0, most=1e18),
    "routing_key": name_text,
    "conversation_id": name_text,
    "max_dynamic_patch": partial(whole, least=0, most=INT32),
    "min_dynamic_patch": partial(whole, least=0, most=INT32),
    "image_max_dynamic_patch": partial(whole, least=0, most=INT32),
    "video_max_dynamic_patch": partial(whole, least=0, most=INT32),
    "lora_id": absent(INTERNAL),
    "http_worker_ipc": absent(INTERNAL),
    "need_wait_for_mm_inputs": absent(INTERNAL),
    "num_items_assigned": absent(INTERNAL),
    "encoder_urls": absent(INTERNAL),
}
# One value for all prompts, or a list with one a prompt.
EACH: Mapping[str, Check] = {
    "return_logprob": flag,
    "logprob_start_len": partial(whole, least=-1, most=INT32),
    "return_sampling_mask": flag,
    "lora_path": name_text,
    "custom_logit_processor": partial(text, most=1 << 20),
    "bootstrap_host": name_text,
    "bootstrap_port": partial(whole, least=0, most=65535),
    "bootstrap_room": partial(whole, least=0, most=INT64 - 2**20),
    "bootstrap_pair_key": name_text,
    "decode_tp_size": partial(whole, least=1, most=INT32),
    "extra_key": name_text,
    "cache_salt": name_text,
}
MEDIA = ("image_data", "video_data", "audio_data")
SESSION: Mapping[str, Check] = {
    "id": name_text,
    "rid": name_text,
    "offset": partial(whole, least=-INT32, most=INT32),
    "replace": flag,
    "drop_previous_output": flag,
}


def check(obj: Any, limits: Limits) -> None:
    """Raise Refusal for the first field of a generate request that cannot be served.

    Args:
        obj: a GenerateReqInput as the front made it, before SGLang normalises it (any object with its attributes).
    """
    fields = vars(obj)
    prompts = _prompts(fields, limits)
    samples = _sampling(fields.get("sampling_params"), prompts, limits)
    count, most = prompts or 1, limits.flags.guard_max_batch
    if count * samples > most:
        raise Refusal("n", samples, f"at most {most} sequences a request ({count} prompts times n)")
    _fields(fields, prompts, limits)
    _logprobs(fields, prompts, samples, limits)
    _media(fields, limits)


def check_embedding(obj: Any, limits: Limits) -> None:
    """The same for an EmbeddingReqInput: prompts, ids and the fields that it shares."""
    fields = vars(obj)
    prompts = _prompts(fields, limits, pairs=bool(fields.get("is_cross_encoder_request")))
    _sampling(fields.get("sampling_params"), prompts, limits)
    _fields(fields, prompts, limits)
    _media(fields, limits)
    if fields.get("dimensions") is not None:
        whole("dimensions", fields["dimensions"], 1, INT32)


def _prompts(fields: Mapping[str, Any], limits: Limits, pairs: bool = False) -> int | None:
    """Number of prompts of a batch; None for a single request."""
    written, tokens, rows = fields.get("text"), fields.get("input_ids"), fields.get("input_embeds")
    if written is None and tokens is None and rows is None:
        if any(fields.get(name) is not None for name in MEDIA):
            _media(fields, limits)
        raise Refusal("text", None, "a prompt (text or input_ids)")
    sizes = []
    if written is not None:
        sizes.append(("text", _text(written, limits, pairs)))
    if tokens is not None:
        sizes.append(("input_ids", _tokens(tokens, fields, limits)))
    if rows is not None:
        sizes.append(("input_embeds", _embeds(rows, limits)))
    (first, size), *others = sizes
    for name, other in others:
        if other != size:
            raise Refusal(name, "another number of prompts", f"as many prompts as {first}")
    return size


def _text(value: Any, limits: Limits, pairs: bool) -> int | None:
    most = limits.flags.guard_max_body_mb << 20
    if isinstance(value, str):
        text("text", value, most, 1)
        return None
    sequence("text", value, limits.flags.guard_max_batch, "strings")
    if not value:
        raise Refusal("text", "empty", "at least one prompt")
    for i, entry in enumerate(value):
        if pairs and isinstance(entry, list):
            for part in sequence(f"text[{i}]", entry, 2, "strings"):
                text(f"text[{i}]", part, most, 1)
        else:
            text(f"text[{i}]", entry, most, 1)
    return len(value)


def _tokens(value: Any, fields: Mapping[str, Any], limits: Limits) -> int | None:
    sequence("input_ids", value, max(limits.context, limits.flags.guard_max_batch), "token ids")
    session = fields.get("session_params")
    if not value:
        if isinstance(session, Mapping) and session.get("id"):
            return None  # the session's own tokens are the prompt
        raise Refusal("input_ids", "empty", "at least one token id")
    if not isinstance(value[0], list | tuple):
        ids("input_ids", value, limits.vocab, limits.context)
        return None
    sequence("input_ids", value, limits.flags.guard_max_batch, "prompts")
    for i, row in enumerate(value):
        ids(f"input_ids[{i}]", row, limits.vocab, limits.context, empty=False)
    return len(value)


def _embeds(value: Any, limits: Limits) -> int | None:
    sequence("input_embeds", value, limits.context, "rows")
    if not value:
        raise Refusal("input_embeds", "empty", "at least one row")
    first = value[0]
    if isinstance(first, list | tuple) and first and isinstance(first[0], list | tuple):
        for i, prompt in enumerate(value):
            _rows(f"input_embeds[{i}]", prompt, limits)
        return len(value)
    _rows("input_embeds", value, limits)
    return None


def _rows(name: str, value: Any, limits: Limits) -> None:
    for i, row in enumerate(sequence(name, value, limits.context, "rows")):
        where = f"{name}[{i}]"
        if len(sequence(where, row, INT32, "numbers")) != limits.hidden:
            raise Refusal(where, f"{len(row)} numbers", f"{limits.hidden} numbers, the model's hidden size")
        for j, number in enumerate(row):
            real(f"{where}[{j}]", number, -3e38, 3e38)
            if type(number) is not float:
                raise Refusal(f"{where}[{j}]", number, "a number with a decimal point")
    if not value:
        raise Refusal(name, "empty", "at least one row")


def _sampling(params: Any, prompts: int | None, limits: Limits) -> int:
    """Check all of them; the number of samples of each prompt (a beam is one)."""
    if params is None:
        return 1
    if not isinstance(params, list | tuple):
        sampling.check("sampling_params", params, limits)
        first: Mapping[str, Any] = params
    else:
        if prompts is None:
            raise Refusal("sampling_params", params, "one object for one prompt")
        if len(params) != prompts:
            raise Refusal("sampling_params", params, f"one object a prompt ({prompts})")
        for i, entry in enumerate(params):
            sampling.check(f"sampling_params[{i}]", entry, limits)
        first = params[0]
        counts = {entry.get("n", 1) for entry in params}
        if len(counts) > 1:
            raise Refusal("n", f"{min(counts)} to {max(counts)}", "the same number for all prompts of a request")
        widths = {entry.get("beam_width") or 1 for entry in params}
        if len(widths) > 1:
            raise Refusal("beam_width", f"{min(widths)} to {max(widths)}", "the same number for all prompts")
    if (first.get("beam_width") or 1) > 1:
        return 1
    return int(first.get("n", 1))


def _fields(fields: Mapping[str, Any], prompts: int | None, limits: Limits) -> None:
    for name, value in fields.items():
        if value is None:
            continue
        if name in PLAIN:
            PLAIN[name](name, value)
        elif name in EACH:
            each(EACH[name], name, value, prompts)
    _rid(fields.get("rid"), prompts, limits)
    _session(fields.get("session_params"))
    _dicts(fields)
    _labels(fields.get("custom_labels"), limits)
    if fields.get("return_routed_experts") and not limits.routed_experts:
        raise Refusal(
            "return_routed_experts", True, "false (the server was started without --enable-return-routed-experts)"
        )
    if fields.get("return_indexer_topk") and not limits.indexer_topk:
        raise Refusal(
            "return_indexer_topk", True, "false (the server was started without --enable-return-indexer-topk)"
        )
    for name in ("positional_embed_overrides", "embed_overrides"):
        if _from_json(fields.get(name)):
            raise Refusal(name, fields[name], f"no value ({INTERNAL})")
    hidden = fields.get("return_hidden_states")
    if hidden is not None:
        each(_mode, "return_hidden_states", hidden, prompts)


def _mode(name: str, value: Any) -> None:
    if type(value) is not bool and not isinstance(value, str):
        raise Refusal(name, value, "true, false or the name of a mode")


def _from_json(value: Any) -> bool:
    """Whether a value could have come as JSON; tensors come from Python callers only."""
    if isinstance(value, list | tuple):
        return any(_from_json(part) for part in value)
    return isinstance(value, dict | str | int | float)


def each(check: Check, name: str, value: Any, prompts: int | None) -> None:
    """One value for all prompts, or a list with one a prompt (None: a single request, which takes no list)."""
    if not isinstance(value, list | tuple):
        check(name, value)
        return
    if prompts is None:
        raise Refusal(name, value, "one value for one prompt")
    if len(value) != prompts:
        raise Refusal(name, f"{len(value)} values", f"one value, or one a prompt ({prompts})")
    for i, entry in enumerate(value):
        optional(check)(f"{name}[{i}]", entry)


def _rid(value: Any, prompts: int | None, limits: Limits) -> None:
    if value is None:
        return
    if isinstance(value, str):
        _one_rid("rid", value)
        return
    if prompts is None:
        raise Refusal("rid", value, "one string")
    sequence("rid", value, limits.flags.guard_max_batch, "request ids")
    if len(value) != prompts:
        raise Refusal("rid", f"{len(value)} ids", f"one id a prompt ({prompts})")
    for i, entry in enumerate(value):
        _one_rid(f"rid[{i}]", entry)
    if len(set(value)) != len(value):
        twice = next(entry for i, entry in enumerate(value) if entry in value[:i])
        raise Refusal("rid", twice, "a different id for each prompt")


def _one_rid(name: str, value: Any) -> None:
    text(name, value, MAX_NAME, 1)
    if not value.isprintable():
        raise Refusal(name, value, "printable characters")


def _session(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise Refusal("session_params", value, "an object")
    for key, entry in value.items():
        if key not in SESSION:
            raise Refusal(f"session_params.{key}", entry, f"one of {', '.join(SESSION)}")
        if entry is not None:
            SESSION[key](f"session_params.{key}", entry)


def _dicts(fields: Mapping[str, Any]) -> None:
    for name in ("images_config", "mm_processor_kwargs", "video_config", "external_trace_header"):
        if fields.get(name) is not None and not isinstance(fields[name], Mapping):
            raise Refusal(name, fields[name], "an object")
    modalities = fields.get("modalities")
    if modalities is not None:
        for i, entry in enumerate(sequence("modalities", modalities, 4096, "names")):
            if entry is not None:
                text(f"modalities[{i}]", entry, MAX_NAME)


def _labels(labels: Any, limits: Limits) -> None:
    """NOTE: a name that the metrics do not have would end SGLang's tokenizer manager, at the first token."""
    if labels is None:
        return
    if not isinstance(labels, Mapping):
        raise Refusal("custom_labels", labels, "an object of strings")
    for key, value in labels.items():
        if key not in limits.labels:
            known = f"one of {', '.join(sorted(limits.labels))}" if limits.labels else "no label"
            raise Refusal("custom_labels key", key, f"{known} (--tokenizer-metrics-allowed-custom-labels)")
        text(f"custom_labels.{key}", value, MAX_NAME)


def _logprobs(fields: Mapping[str, Any], prompts: int | None, samples: int, limits: Limits) -> None:
    top = fields.get("top_logprobs_num")
    if top is not None:
        each(partial(whole, least=0, most=limits.top_logprobs), "top_logprobs_num", top, prompts)
    wanted = fields.get("token_ids_logprob")
    most = limits.flags.guard_max_list
    if isinstance(wanted, list | tuple) and wanted and any(isinstance(part, list | tuple) for part in wanted):
        each(partial(ids, vocab=limits.vocab, most=most), "token_ids_logprob", wanted, prompts)
    elif isinstance(wanted, list | tuple):
        ids("token_ids_logprob", wanted, limits.vocab, most)
    elif wanted is not None:
        whole("token_ids_logprob", wanted, 0, limits.vocab - 1)
    if samples > 1:
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask"):
            if isinstance(fields.get(name), list | tuple):
                raise Refusal(name, fields[name], "one value for all prompts where n is above 1")
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        _positions(name, fields.get(name), prompts, limits)


def _positions(name: str, value: Any, prompts: int | None, limits: Limits) -> None:
    """Positions in the prompt; that they lie inside it is checked once it is tokenised."""
    if value is None:
        return
    one = partial(ids, vocab=limits.context, most=limits.context)
    if isinstance(value, list | tuple) and any(isinstance(row, list | tuple) for row in value):
        each(one, name, value, prompts)
    elif prompts is None:
        one(name, value)
    else:
        raise Refusal(name, value, f"a list of positions a prompt ({prompts})")


def _media(fields: Mapping[str, Any], limits: Limits) -> None:
    if not limits.text_only:
        return
    for name in MEDIA:
        if _given(fields.get(name)):
            raise Refusal(name, fields[name], "no value (the model takes text only)")


def _given(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_given(part) for part in value)
    return value is not None
