"""A plan as figures with their formulae: the same list makes the text and the JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from attention.indexer.split import logits_elements
from attention.indexer.split import workspace_bytes as index_bytes
from attention.workspace import workspace_bytes
from glm_runtime.plan.advice import best, binding, trade, turns
from glm_runtime.plan.chunks import index_rows, layer_chunks, step_chunks
from glm_runtime.plan.cost import CostModel, forecast, index_flop, step_cost
from glm_runtime.plan.ranks import dcp_tokens, prefill_shares, scoring_shares
from glm_runtime.plan.setup import Setup
from glm_runtime.plan.size import size
from glm_runtime.plan.timeline import Timeline, timeline
from glm_runtime.plan.traffic import step_traffic, uses_all_to_all

MODEL = "model"


@dataclass(frozen=True)
class Figure:
    """One number. `kind`: "" for what is counted, "model" for a predicted time."""

    key: str
    value: Any
    unit: str = ""
    formula: str = ""
    kind: str = ""

    def json(self) -> dict[str, Any]:
        """Value, unit and what else there is."""
        extra = {name: text for name in ("unit", "formula", "kind") if (text := getattr(self, name))}
        return {"value": self.value, **extra}

    def line(self) -> str:
        """One line of text."""
        value = self.value
        if isinstance(value, float):
            text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        elif isinstance(value, int):
            text = f"{value:,}"
        elif isinstance(value, list | tuple):
            text = " ".join(f"{item:,}" if isinstance(item, int) else f"{item:.4g}" for item in value)
        else:
            text = str(value)
        if self.unit == "bytes" and isinstance(value, int | float) and value >= 1 << 20:
            text += f" bytes ({value / 2**30:.2f} GiB)" if value >= 1 << 30 else f" bytes ({value / 2**20:.1f} MiB)"
        elif self.unit:
            text += f" {self.unit}"
        mark = "  [model]" if self.kind == MODEL else ""
        formula = f"   = {self.formula}" if self.formula else ""
        name = self.key if self.key.startswith("--") else self.key.replace("_", " ")
        return f"  {name:34} {text}{mark}{formula}"


@dataclass
class Section:
    """Figures under one title, and remarks."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, value: Any, unit: str = "", formula: str = "", kind: str = "") -> None:
        """One figure more."""
        self.figures.append(Figure(key, value, unit, formula, kind))


def sections(
    setup: Setup, budgets: list[int] | None = None, advise: bool = True, each_step: bool = False
) -> list[Section]:
    """The whole plan. `each_step`: one figure a step as well."""
    steps = timeline(setup)
    found = [_model(setup), _steps(setup, steps), _indexer(setup, steps), _memory(setup)]
    found += [_parallel(setup, steps), _times(setup, steps)]
    if each_step:
        found.append(_table(setup, steps))
    if budgets:
        found.append(_trade(setup, budgets))
    found.append(_advice(setup, steps, advise))
    return found


def text(parts: Iterable[Section]) -> str:
    """For a terminal."""
    lines: list[str] = []
    for part in parts:
        lines += [part.title, *(figure.line() for figure in part.figures), *(f"  - {note}" for note in part.notes), ""]
    return "\n".join(lines)


def as_json(parts: Iterable[Section]) -> dict[str, Any]:
    """Section -> figure -> value, unit, formula, kind; remarks under "notes"."""
    found: dict[str, Any] = {}
    for part in parts:
        found[part.title] = {figure.key: figure.json() for figure in part.figures}
        if part.notes:
            found[part.title]["notes"] = part.notes
    return found


def _model(setup: Setup) -> Section:
    model, part = setup.model, Section("model and launch")
    part.add("model", model.name)
    part.add("devices", f"{setup.devices} x {setup.device.name}")
    sizes = setup.sizes
    part.add("ranks", f"tp {sizes.tp}  pcp {sizes.pcp}  dcp {sizes.dcp}  dp {sizes.dp}  ep {setup.ep}")
    part.add("layers", [model.layers, model.full_layers, model.moe_layers], "(all, with an indexer, with experts)")
    part.add("parameters", model.total_parameters)
    part.add("prompt_tokens", setup.context)
    part.add("positions", setup.position_limit)
    flags = setup.ledger_flags
    part.add("max_num_batched_tokens", flags.max_num_batched_tokens)
    part.add("max_num_seqs", flags.max_num_seqs)
    part.add("kv_cache", setup.kv)
    part.add("weights", setup.weights)
    if setup.refused:
        part.notes.append(setup.refused)
    if setup.unbuilt:
        part.notes.append(setup.unbuilt)
    return part


def _steps(setup: Setup, steps: Timeline) -> Section:
    part = Section("steps")
    chunks = [step for step in steps.prefill if step.rows]
    part.add("cached_tokens", steps.hit, formula="whole pages of --cached-prefix, at most all but one token")
    part.add("tokens_to_compute", setup.context - steps.hit)
    part.add("prefill_steps", len(chunks), formula="by the ledger")
    part.add("first_token_in_step", steps.prefill[-1].number)
    part.add("first_decode_in_step", steps.first_decode)
    part.add("last_chunk", [chunks[-1].start, chunks[-1].end], "(first position, end)")
    part.add("largest_step_tokens", max(step.tokens for step in steps.prefill))
    return part


def _indexer(setup: Setup, steps: Timeline) -> Section:
    model, part = setup.model, Section("indexer")
    last = [step for step in steps.prefill if step.rows][-1]
    cut = step_chunks(setup, last)
    part.add("E_logits", logits_elements(setup.logits_bytes), formula="--sparse-indexer-max-logits-mb / 4 B")
    part.add("W_rows", index_rows(setup), formula="positions x 8 x factor")
    part.add("chunks_last_step", cut.chunks, formula="pack by request under W and E, then E // keys rows at once")
    part.add("rows_at_once_last_step", cut.rows_at_once)
    chunks = layer_chunks(setup, steps.prefill)
    part.add("chunks_a_layer", chunks, formula="sum over the steps")
    part.add("chunks_in_all", chunks * model.full_layers, formula=f"x {model.full_layers} layers with an indexer")
    visits = sum(step.visits for step in steps.prefill)
    part.add("key_visits_a_layer", visits, formula="sum of position + 1")
    part.add("scoring_pflop", index_flop(setup, visits) * model.full_layers / 1e15, formula="2 heads dim visits layers")
    part.add(
        "pairs_launched_last_step", last.rows * last.end, formula="rows x keys of the chunk, masked ones among them"
    )
    return part


def _memory(setup: Setup) -> Section:
    found, part = size(setup), Section("memory of a rank")
    part.add(
        "weights", found.weights, "bytes", f"parameters x {setup.weights}, experts over {setup.expert_ranks} ranks"
    )
    latent = f"{setup.model.layers} x {setup.latent_row} / dcp {setup.sizes.dcp}"
    part.add("kv_bytes_a_token", found.token, "bytes", f"{latent} + {setup.model.full_layers} x {setup.index_row}")
    part.add("index_bytes_a_token", setup.model.full_layers * setup.index_row, "bytes")
    part.add(
        "index_workspace_rule", index_bytes(found.index_rule), "bytes", "positions x 8 x factor x 132 B, before the cut"
    )
    rule = f"min({found.index_rule:,} = positions x 8 x {found.factor}, requests x positions, pool) x 132 B"
    part.add("index_workspace", found.index_buffer, "bytes", rule if setup.qchunk else "the ragged indexer has none")
    part.add(
        "prefill_workspace_rule", workspace_bytes(found.prefill_rule), "bytes", "positions x factor x 1152 B, uncut"
    )
    rule = f"min({found.prefill_rule:,} = positions x {found.factor}, requests x positions, pool) x 1152 B"
    part.add("prefill_workspace", found.prefill_buffer, "bytes", rule if setup.gathers else setup.reads[1])
    part.add("prefill_reads", setup.reads[0], formula=setup.reads[1])
    part.add("logits", found.logits, "bytes", "min(cap, rows x keys x 4 B)")
    part.add("kv_capacity_tokens", found.capacity, formula="(memory x share - weights - buffers) / token, whole pages")
    part.add("full_length_requests", found.capacity / setup.position_limit)
    part.notes.append(
        f"share of memory {setup.memory_share:.2f} (--mem-fraction-static); activations, graphs and communication "
        "buffers live in the rest"
    )
    return part


def _parallel(setup: Setup, steps: Timeline) -> Section:
    part = Section("ranks and exchange")
    chunks = [step for step in steps.prefill if step.rows]
    for name, step in (("first", chunks[0]), ("last", chunks[-1])):
        if setup.sizes.pcp > 1:
            shares = prefill_shares(setup, step)
            part.add(f"pcp_rows_{name}_step", list(shares.rows), formula=setup.split)
            part.add(f"pcp_imbalance_{name}_step", shares.imbalance, formula="largest key visits / mean")
        if setup.sizes.tp > 1 and setup.sizes.pcp == 1:
            scored = scoring_shares(setup, step)
            part.add(f"tp_scoring_rows_{name}_step", list(scored.rows), formula=scored.why)
    if setup.sizes.dcp > 1:
        part.add("dcp_latent_rows", dcp_tokens(setup, setup.context), formula="of the prompt, on each rank")
    moved = step_traffic(setup, chunks[-1])
    for name in ("reduce", "topk", "latent", "index_keys", "hidden", "dispatch", "combine", "shards"):
        if getattr(moved, name):
            part.add(f"{name}_bytes_last_step", getattr(moved, name), "bytes", _TRAFFIC[name])
    part.add("received_bytes_last_step", moved.total, "bytes", "all of them, by one rank")
    if setup.ep > 1 and not uses_all_to_all(setup):
        part.notes.append("EP without DP or PCP: every rank has all rows, so nothing is dispatched; sums are reduced")
    return part


_TRAFFIC = {
    "reduce": "2 (t-1)/t rows hidden 2 B, twice a layer",
    "topk": "rows topk 4 B less the own part, a full layer",
    "latent": "(P-1) padded rows 1152 B, a layer",
    "index_keys": "(P-1) padded rows 256 B, a full layer",
    "hidden": "(P-1) padded rows hidden 2 B, once",
    "dispatch": "rows experts hidden 1 B, a MoE layer",
    "combine": "rows experts hidden 2 B, a MoE layer",
    "shards": "(W-1) shard rows 1152 B, a layer",
}


def _times(setup: Setup, steps: Timeline) -> Section:
    times, part = forecast(setup, steps), Section("predicted times")
    part.add("ttft", times.ttft, "s", "sum of the steps", MODEL)
    part.add("longest_step", times.stall, "s", "what a decode waits for its next token while the prompt runs", MODEL)
    if times.beside is not None:
        part.add("decode_step_alone", times.beside, "s", "the decodes without the prompt", MODEL)
        part.add("decode_stall", times.stall / times.beside, "x", "longest step / decode step alone", MODEL)
    for name, seconds in sorted(times.terms.items(), key=lambda item: -item[1]):
        if seconds:
            part.add(name.replace(" ", "_"), seconds, "s", f"{seconds / times.ttft:.0%} of ttft", MODEL)
    part.notes += ["assumed: " + line for line in setup.device.assumptions()]
    return part


def _table(setup: Setup, steps: Timeline) -> Section:
    part, model = Section("every step"), CostModel(setup)
    for step in steps.prefill:
        seconds = step_cost(setup, step, model).seconds
        chunks = step_chunks(setup, step).chunks
        values = [step.start, step.rows, step.decode_rows, chunks, 1e3 * seconds]
        part.add(f"step_{step.number}", values, "(start, prompt rows, decode rows, chunks a layer, ms)", kind=MODEL)
    return part


def _trade(setup: Setup, budgets: list[int]) -> Section:
    part = Section("token budget: wait of the prompt against stall of the decodes")
    for tokens, count, ttft, stall in trade(setup, budgets):
        part.add(f"budget_{tokens}", [count, ttft, stall], "(steps, ttft s, longest step s)", kind=MODEL)
    return part


def _advice(setup: Setup, steps: Timeline, advise: bool) -> Section:
    times, part = forecast(setup, steps), Section("what binds, and the knob to turn")
    part.notes += binding(setup, steps, times)
    if not advise:
        return part
    turned = turns(setup)
    for turn in turned:
        part.add(turn.flag, [turn.ttft, turn.stall, turn.capacity], "(ttft s, longest step s, KV tokens)", kind=MODEL)
    first, stall = best(turned, times)
    for what, now, chosen in (("ttft", times.ttft, first), ("longest step", times.stall, stall)):
        if chosen is None:
            part.notes.append(f"{what} {now:.4g} s: no single knob within reach shortens it by 2% or more [model]")
            continue
        then = chosen.ttft if what == "ttft" else chosen.stall
        part.notes.append(
            f"best knob for the {what}: {chosen.flag}  ({now:.4g} -> {then:.4g} s; ttft {chosen.ttft:.4g} s, "
            f"longest step {chosen.stall:.4g} s) [model]"
        )
    return part
