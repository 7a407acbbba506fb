"""The comparison as one HTML page that needs no network: style and drawings are in it. Pure.

verdict | settings that differ | steps on one time axis | figures | distributions | answers | all settings
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from glm_runtime.ab.outcome import Outcome
from glm_runtime.ab.report import curves, svg, timeline
from glm_runtime.ab.report.table import ROWS, difference, kind_rows, number, ratio
from glm_runtime.ab.settings import Setting, differences, shown
from glm_runtime.ab.stats import Ratio

STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 FONT}
main{max-width:1120px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:18px;margin:40px 0 10px}
p{margin:6px 0;max-width:76ch}
.soft-text,figcaption,small{color:var(--soft)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--panel);padding:1px 5px;
border-radius:4px;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:20px 0}
.card{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 16px}
.card b{display:block;font-size:22px;line-height:1.25;font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:13px}
.bad b,.worse{color:var(--stall)}.fine b,.better{color:var(--good)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:5px 14px 5px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
thead th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--line)}
td.bounds{color:var(--soft);font-size:12.5px;padding-left:0}
td.words{text-align:left}
tr.differs td{background:var(--mark)}
tr.differs td:first-child{box-shadow:inset 3px 0 var(--prefill);padding-left:10px}
.wide svg{min-width:760px}
figure{margin:12px 0}figure svg{width:100%;height:auto;display:block}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:20px}
.legend span{margin-right:22px;white-space:nowrap}.swatch{vertical-align:middle;margin-right:7px}
details{margin:12px 0}summary{cursor:pointer;color:var(--soft)}
"""


def page(found: Outcome) -> str:
    """The whole page."""
    style = STYLE.replace("FONT", svg.FONT) + svg.variables() + svg.drawing_rules()
    parts = [
        _head(found),
        _differences(found),
        _steps(found),
        _figures(found),
        _curves(found),
        _answers(found),
        _all_settings(found),
        _again(found),
    ]
    title = escape(" and ".join(found.arms)) if len(found.arms) < 4 else f"{len(found.arms)} arms"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>A/B: {title}</title>\n<style>{style}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def picture(found: Outcome) -> str:
    """The steps alone, as an SVG file."""
    load = found.workload
    return timeline.draw(_lanes(found), [ask.at for ask in load.asks], f"{load.name}: {load.text}", alone=True)


def _cell(content: str, kind: str = "") -> str:
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _head(found: Outcome) -> str:
    load = found.workload
    rounds = max(len(runs) for runs in found.runs.values())
    where = ", ".join(str(value) for value in found.machine.values() if value)
    reuse = "" if load.reuse is None else f", {load.reuse:.0%} of them in shared prefixes"
    cards = [_equality_card(found)]
    differing = differences(found.settings)
    count = len([one for one in differing if one.group == "effective"])
    cards.append(
        _card(
            f"{count} settings differ" if count else "settings alike",
            "beside the policy's slots; listed first" if count else "beside the policy's slots",
            "bad" if count else "fine",
        )
    )
    for name in ("max_itl_ms", "median_ttft_ms", "output_throughput"):
        best = _best(found, name)
        if best:
            cards.append(_card(best[0], best[1]))
    return (
        f"<h1>{escape(' · '.join(found.arms))}</h1>"
        f'<p class="soft-text">{escape(load.name)}: {escape(load.text)}. {len(load.asks)} requests, '
        f"{load.prompt_tokens:,} prompt tokens{reuse}; {rounds} round{'s' * (rounds > 1)} an arm, in turn. "
        f"{escape(where)}</p>"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _card(big: str, small: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><b>{escape(big)}</b><span>{escape(small)}</span></div>'


def _equality_card(found: Outcome) -> str:
    asked = sum(one.asked for one in found.equalities)
    equal = sum(one.equal for one in found.equalities)
    if not asked:
        return _card("not compared", "one run only")
    if found.real:
        return _card(f"{found.real} differ", f"of {asked} answers, for no other reason than the arm", "bad")
    if equal < asked:
        return _card(f"{asked - equal} within noise", f"of {asked} answers differ, as equal arms do too", "fine")
    return _card("equal", f"all {asked} compared answers, token for token", "fine")


def _best(found: Outcome, name: str) -> tuple[str, str] | None:
    """The arm that is best by a figure, in words."""
    title, unit, less = ROWS[name]
    values = {arm: own[name] for arm, own in found.figures.items() if math.isfinite(own.get(name, math.nan))}
    if len(values) < 2:
        return None
    best = (min if less else max)(values, key=lambda arm: values[arm])
    others = ", ".join(number(value) for arm, value in values.items() if arm != best)
    return best, f"{'lowest' if less else 'highest'} {title}: {number(values[best])} against {others} {unit}"


def _setting_row(one: Setting, mark: bool) -> str:
    cells = _cell(escape(one.name)) + "".join(_cell(escape(shown(value))) for value in one.values)
    return f'<tr class="{"differs" if mark and one.differs else ""}">{cells}</tr>'


def _differences(found: Outcome) -> str:
    differing = differences(found.settings)
    if not differing:
        return "<h2>Settings</h2><p>All effective settings of the arms are alike.</p>"
    common = [one for one in found.settings if one.group in ("policy", "effective")]
    own = [one for one in differing if one.group not in ("policy", "effective")]
    rows = [_setting_row(one, True) for one in common]
    more = ""
    if own:
        body = _table(["setting", *found.arms], [_setting_row(one, False) for one in own])
        more = f"<details><summary>{len(own)} more that differ, by their own names</summary>{body}</details>"
    return (
        "<h2>What the arms ran with</h2>"
        "<p>As the servers reported it. Marked rows differ: part of any difference below may be theirs.</p>"
        + _table(["setting", *found.arms], rows)
        + more
    )


def _lanes(found: Outcome) -> list[timeline.Lane]:
    lanes = []
    for arm, runs in found.runs.items():
        run = runs[-1]
        gap = max((max(reply.itl) for reply in run.replies if reply.itl), default=math.nan) * 1e3
        first = max((reply.ttft for reply in run.replies if not reply.error), default=math.nan) * 1e3
        peak = f"; KV {number(found.each[arm][-1]['peak_kv_usage'], '%')} at its peak"
        note = f"longest gap between tokens {number(gap)} ms, longest wait for a first token {number(first)} ms{peak}"
        lanes.append(
            timeline.Lane(arm, note, run.steps, run.start, run.policy["knobs"].get("max_total_num_tokens") or 0)
        )
    return lanes


def _steps(found: Outcome) -> str:
    drawing = timeline.draw(_lanes(found), [ask.at for ask in found.workload.asks])
    return (
        f'<h2>Steps</h2><figure><div class="scroll wide">{drawing}</div><figcaption>The last round of each arm, all '
        "from the arrival of the first request on. Point at a bar for its rows and its time.</figcaption></figure>"
    )


def _verdict(name: str, one: Ratio | None) -> str:
    less = ROWS[name][2]
    if one is None or not one.clear or less is None:
        return ""
    return "better" if (one.value < 1) == less else "worse"


def _figures(found: Outcome) -> str:
    rows = []
    for name, (title, unit, _) in ROWS.items():
        if not any(name in own for own in found.figures.values()):
            continue
        named = f"{title}<small> {unit}</small>" if unit and unit != "%" else title
        cells = [_cell(named)]
        for place, arm in enumerate(found.arms):
            one = found.ratios.get(arm, {}).get(name)
            cells.append(_cell(number(found.figures[arm].get(name), unit), _verdict(name, one)))
            if place:
                cells.append(_cell(ratio(one), "bounds"))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = ["", found.arms[0]] + [cell for arm in found.arms[1:] for cell in (arm, "over the first")]
    limits = [
        f"{name.upper()} {value:g} ms" for name, value in (("ttft", found.slo.ttft), ("itl", found.slo.itl)) if value
    ]
    goodput = f" Goodput counts requests within {' and '.join(limits)} (ITL: 99 of 100 gaps)." if limits else ""
    kinds = kind_rows(found)
    by_kind = ""
    if kinds:
        body = [f"<tr>{''.join(_cell(escape(cell)) for cell in row)}</tr>" for row in kinds[1:]]
        by_kind = "<h2>By kind of request, ms</h2>" + _table(kinds[0], body)
    return (
        "<h2>Figures</h2><p>All rounds. Ratios are to the first arm, with a 95% interval of a paired bootstrap over "
        "requests; of throughput, the least and the largest ratio of the rounds. Coloured where the interval leaves 1 "
        f"out.{goodput}</p>" + _table(head, rows) + by_kind
    )


def _curves(found: Outcome) -> str:
    gaps, first = {}, {}
    for arm, runs in found.runs.items():
        replies = [reply for run in runs for reply in run.replies if not reply.error]
        gaps[arm] = [gap * 1e3 for reply in replies for gap in reply.itl]
        first[arm] = [reply.ttft * 1e3 for reply in replies]
    legend = "".join(f"<span>{curves.swatch(place)}{escape(arm)}</span>" for place, arm in enumerate(found.arms))
    drawings = [
        curves.draw("Time between tokens (ITL): share of gaps up to", gaps, found.slo.itl),
        curves.draw("Time to first token (TTFT): share of requests up to", first, found.slo.ttft),
    ]
    figures = "".join(f"<figure>{one}</figure>" for one in drawings if one)
    return f'<h2>Distributions</h2><p class="legend">{legend}</p><div class="two">{figures}</div>'


def _answers(found: Outcome) -> str:
    noise = found.noise
    if found.repeated:
        said = (
            f"Equal arms (the same flags, another round): the logprob of a token differs by up to {noise.logprob:.3g}, "
            f"over {noise.tokens:,} tokens; {noise.divergences} of {noise.pairs} answers diverge. A divergence counts "
            f"as noise up to a gap of {noise.explains:.3g}."
        )
    else:
        said = "No arm ran twice, so there is no noise floor: every divergence counts as real."
    rows = []
    for one in found.equalities:
        cells = [one.b, str(one.asked), str(one.equal), str(one.explained), str(one.real)]
        rows.append(f"<tr>{''.join(_cell(escape(cell)) for cell in cells)}</tr>")
    head = ["against " + (found.equalities[0].a if found.equalities else ""), "compared", "equal", "noise", "real"]
    detail = []
    for one in found.equalities:
        for gone in one.divergences[:50]:
            cells = [_cell(escape(one.b)), _cell(str(gone.request)), _cell(escape(difference(gone)), "words")]
            detail.append(f"<tr>{''.join(cells)}</tr>")
    more = ""
    if detail:
        body = _table(["run", "request", "first difference (gaps are logprobs)"], detail)
        more = f"<details open><summary>Where they differ</summary>{body}</details>"
    return f"<h2>Answers</h2><p>{said}</p>{_table(head, rows)}{more}"


def _all_settings(found: Outcome) -> str:
    rows = [_setting_row(one, True) for one in found.settings]
    body = _table(["setting", *found.arms], rows)
    return f"<h2>All settings</h2><details><summary>{len(rows)} settings</summary>{body}</details>"


def _again(found: Outcome) -> str:
    flags = "".join(
        f"<li>{escape(arm)}: <code>{escape(' '.join(runs[0].flags))}</code></li>" for arm, runs in found.runs.items()
    )
    return (
        f"<h2>Again</h2><p><code>{escape(found.command)}</code></p><ul>{flags}</ul>"
        "<p>Beside this page: <code>figures.json</code>, <code>figures.csv</code>, <code>bench.jsonl</code> (field "
        "names of SGLang's and vLLM's serving benchmarks), <code>trace.json</code> (open it at ui.perfetto.dev), "
        "<code>runs/</code> (every answer; <code>--against</code> this folder compares with it later).</p>"
    )
