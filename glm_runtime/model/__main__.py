"""`python -m glm_runtime.model`: write a model folder, or print the measured figures of one."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import NoReturn

from glm_runtime.model.build import build, ensure, ensure_recipe
from glm_runtime.model.recipe import DTYPES, PRESETS, Recipe, RecipeError, preset

_FLAGS = {
    "layers": "decoder layers, the MTP layer not counted",
    "hidden": "hidden size, a multiple of 256",
    "heads": "attention heads",
    "moe_inter": "width of one expert, at least hidden / 2",
    "experts": "routed experts",
    "experts_per_token": "routed experts a token visits",
    "index_topk": "cached tokens the indexer selects",
    "context": "max_position_embeddings",
    "dtype": "of the stored weights",
    "seed": "of the random part of the weights",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m glm_runtime.model", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: the user's cache)")
    parser.add_argument("--preset", default="tiny", help=f"one of {', '.join(PRESETS)} (default tiny)")
    parser.add_argument("--report", action="store_true", help="print the measured gaps of the model, write no folder")
    defaults = dataclasses.asdict(PRESETS["tiny"])
    for name, text in _FLAGS.items():
        flag = "--" + name.replace("_", "-")
        if name == "dtype":
            parser.add_argument(flag, choices=DTYPES, help=f"{text} (default: the preset's; tiny {defaults[name]})")
        else:
            help_text = f"{text} (default: the preset's; tiny {defaults[name]})"
            parser.add_argument(flag, dest=name, type=int, metavar="N", help=help_text)
    return parser


def _recipe(args: argparse.Namespace) -> Recipe:
    given = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    return dataclasses.replace(preset(args.preset), **given)


def _flag_line(text: str) -> str:
    name, _, rest = text.partition(":")
    flag = name if name.startswith("--") else "--" + name.replace("_", "-")
    return f"error: {flag}:{rest}"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit code, 2 for a flag that cannot be honoured."""
    args = _parser().parse_args(argv)
    try:
        recipe = _recipe(args)
        if args.report and args.out is not None:
            raise RecipeError("--report: excludes --out, which writes a folder; give one of the two")
    except RecipeError as error:
        print(_flag_line(str(error)), file=sys.stderr)
        return 2
    label = args.preset if recipe == PRESETS[args.preset] else "custom"
    try:
        if args.report:
            from glm_runtime.model.report import report

            report(ensure_recipe(recipe, label))
            return 0
        start = time.monotonic()
        if args.out is None:
            path = ensure(args.preset) if label != "custom" else ensure_recipe(recipe, label)
        else:
            path = build(recipe, args.out)
    except OSError as error:
        print(f"error: --out: {error}", file=sys.stderr)
        return 2
    size = (path / "model.safetensors").stat().st_size / 1e6
    print(f"{path}  {recipe.layers} layers, {recipe.dtype}, {size:.1f} MB, {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
