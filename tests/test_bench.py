"""`vllm-nixl bench` measures real servers and trainers, and says what it did not measure."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_client.bench import plots
from trainer_client.bench.results import KEYS
from trainer_client.bench.shapes import NAMES, Shape
from trainer_client.cli import main
from trainer_client.commands.bench import parse_size
from vllm_nixl_plugin.errors import InvalidRequest


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run the command; exit status, standard output, standard error."""

    def run(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-nixl", "bench", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.server
def test_a_tiny_model_is_measured_in_every_way(bench, tmp_path: Path) -> None:
    code, out, err = bench(
        "wire", "push", "gap", "memory", "--model-shape", "tiny", "--repeat", 1, "--folder", tmp_path, "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert set(KEYS) <= set(found)
    measured = {"wire_vs_raw", "push_vs_disk_reload", "push_vs_broadcast", "gap_vs_disk_reload"}
    assert all(isinstance(found[key], float) and found[key] > 0 for key in measured)
    assert {key for key in KEYS if found[key] is None} == set(KEYS) - measured == set(found["not_measured"])
    assert found["model"]["nbytes"] == Shape.read("tiny").nbytes
    assert found["settings"]["parts"] == ["wire", "push", "gap", "memory"]
    assert found["versions"]["vllm"]
    assert found["seconds"]["longest gap, disk"] > 0 < found["seconds"]["longest gap, no push"]
    assert {"server, shadow", "trainer, broadcast"} <= set(found["extra_nbytes"])
    assert list(tmp_path.iterdir()) == []  # nothing is left


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_overhead_growth_and_plot(bench, tmp_path: Path) -> None:
    many = json.loads((Path(plots.__file__).parent / "shapes" / "experts.json").read_text()) | {"layers": 8}
    (tmp_path / "many.json").write_text(json.dumps(many))
    code, out, err = bench(
        "overhead", "--model-shape", "tiny", "--repeat", 1, "--many", tmp_path / "many.json", "--planning-layers", 6,
        "--plot", tmp_path / "plot", "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["repush_overhead_ms"] > 0
    assert found["plan_seconds"] > 0
    assert {row["by"] for row in found["growth"]} == set(plots.AXES)
    assert (tmp_path / "plot" / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_is_a_picture_and_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    series = dict.fromkeys(plots.SERIES, 0.5)
    rows = [{"by": by, "x": x, **series} for by in plots.AXES for x in (1, 2)]
    plots.check(tmp_path)
    picture, page = plots.draw(rows, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<script src=" not in page.read_text()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["wires"], "wires"),
        (["push", "--bytes", "much"], "--bytes 'much'"),
        (["push", "--bytes", "0"], "--bytes '0'"),
        (["push", "--repeat", "0"], "--repeat"),
        (["push", "--model-shape", "small"], "small"),
        (["push", "--folder", "nowhere"], "--folder nowhere"),
        (["push", "--device", "cuda:0"], "--device cuda:0"),
        (["growth", "--plot", __file__], "--plot"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(bench, args: list[str], named: str, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = bench(*args)
    assert (code, out) == (1, "")
    assert err.startswith("error: invalid_request: ")
    assert err.count("\n") == 1
    assert named in err


def test_sizes_are_read_in_decimal_units() -> None:
    assert [parse_size(text) for text in ("7", "300MB", "1.5 gb", "2T")] == [7, 300_000_000, 1_500_000_000, 2 * 10**12]
    with pytest.raises(InvalidRequest):
        parse_size("1GiB")


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_has_as_many_layers_as_bytes_are_wanted(name: str, tmp_path: Path) -> None:
    shape = Shape.read(name)
    assert json.loads((shape.write_config(tmp_path) / "config.json").read_text())["num_hidden_layers"] == shape.layers
    larger = shape.of_nbytes(3 * shape.nbytes)
    assert abs(larger.nbytes - 3 * shape.nbytes) <= larger.nbytes / larger.layers
    assert shape.of_nbytes(1).layers == 1
    assert shape.n_weights == len(dict(shape.weights()))
