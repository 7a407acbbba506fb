"""The embedded model: same bytes, loads where it must, keeps every byte, decides clearly, without ties."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from glm_runtime.model import PRESETS, Recipe, RecipeError, build, ensure, rng, tokenizer
from glm_runtime.model.__main__ import main
from glm_runtime.model.build import is_whole
from glm_runtime.model.config import RMS_NORM_EPS, model_config
from glm_runtime.model.report import prompt
from tests import oracle

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure("tiny")


@pytest.fixture(scope="module")
def text(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def command(*flags: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "glm_runtime.model", *flags], cwd=REPO, env=env, capture_output=True, text=True
    )


def test_two_builds_are_byte_equal(folder: Path, tmp_path: Path) -> None:
    assert digests(build(PRESETS["tiny"], tmp_path / "again")) == digests(folder)


def test_noise_is_pinned() -> None:
    """Other bits here mean other models everywhere: raise recipe.REVISION with them."""
    assert [int(word) for word in rng.bits(20, "pinned", 2)] == [15798522661021960036, 4106542687777984449]
    sample = rng.normal(20, "pinned", (200_000,))
    assert abs(float(sample.mean())) < 0.01 and abs(float(sample.std()) - 1.0) < 0.01


def test_seed_changes_the_weights(tmp_path: Path) -> None:
    other = build(Recipe(layers=2, seed=21), tmp_path / "b")
    assert digests(build(Recipe(layers=2), tmp_path / "a"))["model.safetensors"] != digests(other)["model.safetensors"]


def test_router_and_head_weights_survive_bfloat16(folder: Path) -> None:
    lossy = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.float32
            exact = torch.equal(tensor.bfloat16().float(), tensor)
            if name.endswith(("weights_proj.weight", "indexer.wk.weight", "mlp.gate.weight")):
                assert exact, name
            lossy += not exact
    assert lossy > 50  # the others carry full float32, so that a cast to bfloat16 shows


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_config_says_one_thing_in_every_dialect(preset: str) -> None:
    config = model_config(PRESETS[preset])
    full = [i for i, kind in enumerate(config["indexer_types"]) if kind == "full"]
    assert full == [i for i in range(PRESETS[preset].layers) if i in (0, 1, 2, 6, 10, 14)]
    assert [i for i, letter in enumerate(config["index_topk_pattern"]) if letter == "F"] == full
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    assert [i for i in range(PRESETS[preset].layers) if max(i - offset + 1, 0) % freq == 0] == full
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["mlp_layer_types"].count("dense") == config["first_k_dense_replace"] == 1


def test_transformers_reads_the_config(folder: Path) -> None:
    stated = json.loads((folder / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    assert config.indexer_types == stated["indexer_types"]
    assert config.max_position_embeddings == 32768
    latent = oracle.load(folder).model.layers[0].self_attn.kv_a_layernorm
    assert latent.variance_epsilon == stated["rms_norm_eps"] == RMS_NORM_EPS


def test_sglang_reads_the_config(folder: Path) -> None:
    sglang_config = pytest.importorskip("sglang.srt.configs.model_config")
    config = AutoConfig.from_pretrained(folder)
    assert sglang_config.is_deepseek_dsa(config)
    skips = [sglang_config.dsa_layer_skips_topk(config, i) for i in range(config.num_hidden_layers)]
    assert skips == [kind == "shared" for kind in config.indexer_types]
    del config.indexer_types
    assert skips == [sglang_config.dsa_layer_skips_topk(config, i) for i in range(config.num_hidden_layers)]
    del config.index_topk_pattern
    assert skips == [sglang_config.dsa_layer_skips_topk(config, i) for i in range(config.num_hidden_layers)]


def test_mtp_layer_has_the_names_of_a_next_token_loader(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = {name for name in file.keys() if name.startswith("model.layers.8.")}  # noqa: SIM118
        eh_proj = file.get_slice("model.layers.8.eh_proj.weight").get_shape()
    for part in (
        "enorm",
        "hnorm",
        "eh_proj",
        "shared_head.norm",
        "shared_head.head",
        "self_attn.indexer.wq_b",
        "mlp.experts.7.up_proj",
    ):
        assert f"model.layers.8.{part}.weight" in names
    assert eh_proj == [256, 512]


@pytest.mark.parametrize(
    "sample",
    ["", "a", " hello  world\n\n", "naïve ½ Ω 漢字 😀👩‍👩‍👧", "\x00\x01\x7f", "".join(map(chr, range(256)))],
)
def test_text_round_trip(text: PreTrainedTokenizerFast, sample: str) -> None:
    assert text.decode(text.encode(sample)) == sample


def test_random_text_round_trip(text: PreTrainedTokenizerFast) -> None:
    source = random.Random(5)
    for _ in range(200):
        raw = source.randbytes(source.randrange(60)).decode("latin-1") + chr(source.randrange(0x10000, 0x10FFFF))
        assert text.decode(text.encode(raw)) == raw


def test_every_byte_is_a_token(text: PreTrainedTokenizerFast) -> None:
    letters = text.convert_ids_to_tokens(list(range(256)))
    assert letters == tokenizer.byte_letters()
    assert text.decode(list("é😀".encode())) == "é😀"
    assert len(text) == tokenizer.VOCAB_SIZE == model_config(PRESETS["tiny"])["vocab_size"]
    assert text.decode(tokenizer.printable()).isprintable()


def test_chat_template(text: PreTrainedTokenizerFast) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    shown = text.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert shown == (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\n<think></think>\nHello<|user|>\nBye"
        "<|assistant|>\n<think></think>"
    )
    ids = text.encode(shown, add_special_tokens=False)
    assert ids[0] == tokenizer.SPECIAL_START + tokenizer.SPECIALS.index("[gMASK]")
    assert text.decode(ids) == shown
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    assert '"name": "clock"' in text.apply_chat_template(talk[1:2], tools=tools, tokenize=False)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[int, oracle.Answer]:
    return {count: oracle.greedy(folder, prompt(count), 32) for count in (1, 2, 15, 63, 64, 65, 100, 300)}


def test_logits_are_well_separated(answers: dict[int, oracle.Answer]) -> None:
    gaps = torch.tensor([gap for answer in answers.values() for gap in answer.gaps])
    assert float(gaps.median()) > 4.0
    assert float(gaps.quantile(0.05)) > 1.0


def test_generated_text_is_varied_and_printable(folder: Path, answers: dict[int, oracle.Answer]) -> None:
    assert set(oracle.greedy(folder, prompt(100), 64).tokens) <= set(tokenizer.printable())
    assert len(set(oracle.greedy(folder, prompt(100), 64).tokens)) >= 24
    assert len({tuple(answer.tokens) for answer in answers.values()}) == len(answers)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """Collects (lowest kept, highest dropped) index score of every row that drops any."""
    seen: list[tuple[float, float]] = []
    plain = oracle.lowest_first

    def watched(scores: torch.Tensor, k: int, dim: int = -1) -> object:
        visible = (scores > -1e30).sum(-1)
        if scores.shape[-1] > k:
            two = torch.topk(scores, k + 1, dim=-1).values[visible > k]
            seen.extend(zip(two[:, k - 1].tolist(), two[:, k].tolist(), strict=True))
        return plain(scores, k, dim)

    monkeypatch.setattr(oracle, "lowest_first", watched)
    yield seen


@pytest.mark.parametrize("count", [65, 100, 400])
def test_no_ties_at_the_cut(folder: Path, cuts: list[tuple[float, float]], count: int) -> None:
    oracle.run(oracle.load(folder), prompt(count, 1), 4)
    assert len(cuts) >= 4 * (count + 3 - 64)  # four full layers
    assert all(kept > dropped for kept, dropped in cuts)


def test_routing_is_clear_of_rounding(folder: Path) -> None:
    """The last expert taken and the first left out differ by far more than bfloat16 could move them."""
    margins: list[float] = []

    def watch(router: torch.nn.Module, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        choice = outputs[0].sigmoid() + router.e_score_correction_bias
        best = choice.topk(router.top_k + 1, dim=-1).values
        margins.extend((best[:, -2] - best[:, -1]).tolist())

    model = oracle.load(folder)
    hooks = [layer.mlp.gate.register_forward_hook(watch) for layer in model.model.layers[1:]]
    oracle.run(model, list(range(512)), 1)
    for hook in hooks:
        hook.remove()
    assert len(margins) == 7 * 512 and min(margins) > 4e-3


def test_equal_scores_go_to_the_lowest_position() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 5.0]])
    assert oracle.lowest_first(scores, 3).indices.tolist() == [[1, 2, 3], [0, 1, 4]]


def test_attention_decides_tokens(folder: Path, answers: dict[int, oracle.Answer]) -> None:
    """Selecting the most recent tokens instead of the best scored ones must not go unnoticed."""

    def recent(scores: torch.Tensor, k: int, dim: int = -1) -> object:
        place = torch.arange(scores.shape[-1], dtype=torch.float32).expand_as(scores)
        return lowest(place.masked_fill(scores < -1e30, -1e30), k, dim)

    lowest = oracle.lowest_first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "lowest_first", recent)
        wrong = oracle.run(oracle.load(folder), prompt(300), 32)
    assert wrong.tokens != answers[300].tokens


def test_prefill_in_pieces_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = oracle.run(oracle.load(folder), prompt(200), 8)
    monkeypatch.setattr(oracle, "CHUNK", 48)
    pieces = oracle.run(oracle.load(folder), prompt(200), 8)
    assert pieces.tokens == whole.tokens
    assert pieces.prompt_logprobs == pytest.approx(whole.prompt_logprobs, abs=2e-3)


def test_answers_are_kept_on_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = oracle.greedy(folder, [1, 2, 3], 6)
    monkeypatch.setattr(oracle, "run", None)
    assert oracle.greedy(folder, [1, 2, 3], 6) == first
    assert oracle.greedy(folder, [1, 2, 3], 2).tokens == first.tokens[:2]


def test_torn_folder_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = ensure("tiny")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert not is_whole(path, PRESETS["tiny"])
    assert ensure("tiny") == path and is_whole(path, PRESETS["tiny"])
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", path.name]


def test_processes_that_build_at_once(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ask = [sys.executable, "-c", "from glm_runtime.model import ensure; print(ensure())"]
    both = [subprocess.Popen(ask, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in both}
    assert len(said) == 1 and all(process.returncode == 0 for process in both)
    assert is_whole(Path(said.pop()), PRESETS["tiny"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--layers", "0"], "--layers"),
        (["--hidden", "300"], "--hidden"),
        (["--preset", "huge"], "--preset"),
        (["--dtype", "int4"], "--dtype"),
        (["--nonsense", "1"], "--nonsense"),
    ],
)
def test_bad_flags_end_in_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], named: str) -> None:
    try:
        code = main(flags)
    except SystemExit as stop:  # from argparse
        code = stop.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    assert said.err.count("\n") == 1 and named in said.err


def test_command_writes_a_folder(tmp_path: Path) -> None:
    done = command("--out", str(tmp_path / "m"), "--layers", "3", "--dtype", "bfloat16", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3 and config["dtype"] == "bfloat16"
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
        assert file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32


def test_recipe_names_the_field() -> None:
    with pytest.raises(RecipeError, match=r"^experts_per_token: 9 exceeds experts 8$"):
        Recipe(experts_per_token=9)
