"""python -m fidelity [MODEL ...] [--compiled] [--tp N]: prints one line per model; ends with 1 if any differs."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from fidelity.runner import Row, as_dict, prepare, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="fidelity", description=__doc__)
    parser.add_argument("models", nargs="*", help="all, when none is named")
    parser.add_argument("--compiled", action="store_true", help="compiled engines instead of eager ones")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel workers")
    parser.add_argument("--layouts", action="store_true", help="trace and plan what cannot run here, rank by rank")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--keep", type=Path, help="keep the checkpoints and logs of models that are not equal")
    parser.add_argument("--details", type=int, default=12, help="lines to show of each difference")
    options = parser.parse_args()
    prepare()
    if options.layouts:
        return show_layouts(options)
    from fidelity.models import COMPILED, MODELS, TP2

    chosen = options.models or (COMPILED if options.compiled else TP2 if options.tp > 1 else list(MODELS))
    unknown = [name for name in chosen if name not in MODELS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(MODELS)}")
    print(HEAD, flush=True)
    rows: list[Row] = []
    for row in run(chosen, compiled=options.compiled, tp=options.tp, keep=options.keep):
        rows.append(row)
        print(line(row), flush=True)
        if not row.equal:
            for detail in row.details[-options.details :] if "run" in row.result else row.details[: options.details]:
                print("    " + detail[:300], flush=True)
    if options.json:
        options.json.write_text(json.dumps([as_dict(row) for row in rows]))
    equal = sum(row.equal for row in rows)
    bad = [row.model for row in rows if not row.equal and not row.result.startswith("not run")]
    print(f"{equal} equal, {len(rows) - equal - len(bad)} cannot run here, {len(bad)} wrong {' '.join(bad)}")
    return 1 if bad else 0


def show_layouts(options: argparse.Namespace) -> int:
    from fidelity.layouts import ONE, ROWS, run

    known = {row[0] for row in ROWS}
    chosen = [row for row in ROWS if not options.models or row[0] in options.models]
    chosen += [(name, ONE) for name in options.models if name not in known]
    print(f"{'model':24}{'layout':14}{'model kB':>10}{'largest kB':>12}{'fallback':>10}{'s':>7}  result", flush=True)
    rows = []
    for row in run(chosen):
        rows.append(row)
        sizes = f"{row.weights / 1e3:10.0f}{row.largest / 1e3:12.0f}{len(row.fallback):10}"
        unused = f" ({len(row.unused)} weights unused: {', '.join(row.unused[:3])})" if row.unused else ""
        print(f"{row.model:24}{row.layout:14}{sizes}{row.seconds:7.1f}  {row.result}{unused}", flush=True)
        failed = row.result.startswith("FAILED")
        for detail in row.details[-options.details :] if failed else row.details[: options.details]:
            print("    " + detail[:300], flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    bad = [f"{row.model}/{row.layout}" for row in rows if not row.equal]
    print(f"{len(rows) - len(bad)} equal, {len(bad)} wrong {' '.join(bad)}")
    return 1 if bad else 0


HEAD = f"{'model':24}{'layout':8}{'mode':10}{'live kB':>9}{'shadow kB':>11}{'fallback kB':>13}{'s':>7}  result"


def line(row: Row) -> str:
    sizes = f"{row.live / 1e3:9.0f}{row.shadow / 1e3:11.0f}{row.fallback / 1e3:13.0f}"
    return f"{row.model:24}{row.layout:8}{row.mode:10}{sizes}{row.seconds:7.1f}  {row.result}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # an orderly end makes Triton's bindings complain about leaks
