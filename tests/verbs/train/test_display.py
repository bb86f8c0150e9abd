"""Both displays show the same figures. The live one also draws without a terminal."""

import io
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.interface.terminal import fields
from meshwright.spec import Layout
from meshwright.spec.recipe.recipe import BatchStage
from meshwright.verbs.train import display
from meshwright.verbs.train.display import LiveDisplay, Panel, PlainDisplay, choose
from tests.verbs import watched


def terminal(width: int = 100, height: int = 30) -> Console:
    return Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
        record=True,
        force_terminal=True,
        width=width,
        height=height,
        highlight=False,
    )


def shown(panel: Panel, width: int = 100, height: int = 30) -> str:
    console = terminal(width, height)
    console.print(panel)
    return console.export_text()


def panel_after(steps: int, **more: float) -> Panel:
    panel = Panel(watched.info())
    for number in range(1, steps + 1):
        panel.step(watched.step(number, **more), now_s=number * 0.5)
    return panel


def test_plain_lines_keep_their_columns_and_name_every_figure() -> None:
    log = io.StringIO()
    watched.tell(PlainDisplay(log), watched.info(steps=40))
    lines = log.getvalue().splitlines()
    steps = [line for line in lines if "| loss" in line]
    assert len(steps) == 40
    assert len({line[: line.index("eta")].__len__() for line in steps}) == 1
    for word in (
        "loss",
        "smoothed",
        "grad",
        "lr 3.00e-04",
        "tokens/s",
        "mem 0.75 GiB (process)",
        "data wait  2.0%",
        "eta",
    ):
        assert all(word in line for line in steps), word
    assert not any("MFU" in line for line in lines)
    assert watched.EQUATION in log.getvalue()
    assert sum("held out: loss 3.0000, perplexity 20.1, 1.490 bits per byte" in line for line in lines) == 4
    assert sum("saved runs/made-up/checkpoints/step-" in line for line in lines) == 4
    assert lines[-1].startswith("trained 40 of 40 steps")
    assert "\x1b" not in log.getvalue()


def test_the_loss_of_the_step_is_the_headline_and_memory_says_whose_it_is() -> None:
    """The smoothed loss lags behind, so it stands beside, under its own name."""
    log, info = io.StringIO(), replace(watched.info(steps=4), device="NVIDIA H100")
    watched.tell(PlainDisplay(log), info)
    for number, line in enumerate((line for line in log.getvalue().splitlines() if "| loss" in line), 1):
        assert f"| loss {watched.step(number).loss:7.4f} smoothed " in line and "mem 0.75/1.00 GiB" in line
    assert " GiB (tensors)" in log.getvalue().splitlines()[-1]
    printed = shown(panel_after(5))
    assert f"{watched.step(5).loss:.4f}" in printed[printed.index(" loss  ") :][:20] and "smoothed" in printed


def test_utilization_is_printed_with_its_conventions_where_the_peak_is_known() -> None:
    assert fields.utilization(watched.step(1, mfu=0.4)) == "MFU 40.0% causal, 45.0% full, HFU 50.0%"
    assert "40.0% causal, 45.0% full" in shown(panel_after(3, mfu=0.4))
    assert "MFU" not in shown(panel_after(3))


def test_the_panel_shows_curve_figures_evaluation_and_checkpoint() -> None:
    panel = panel_after(20)
    panel.evaluation = watched.evaluation(20)
    panel.checkpoint = (20, watched.summary(20).checkpoint)
    text = shown(panel)
    for word in ("made-up", "1.26M parameters", "CPU, 2 threads", "step 20/40", "50%", "10 s left", "9.12K tokens/s"):
        assert word in text, word
    for word in (
        "0.75 GiB (process)",
        "2.0%",
        "3.00e-04",
        "1.490 bits per byte",
        "checkpoints/step-40",
        "runs/made-up",
    ):
        assert word in text, word
    assert any(0x2800 < ord(letter) < 0x2900 for letter in text)
    assert text.count("\u25c6") == 2, "one point and its legend"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_the_panel_fits_every_terminal(width: int, height: int) -> None:
    panel = panel_after(20, noise_scale_tokens=12_345.0, balance_loss=1.02, loss_scale=65536.0)
    panel.evaluation = watched.evaluation(20)
    lines = shown(panel, width, height).splitlines()
    assert all(len(line) <= width for line in lines)
    if height >= 24:
        assert len(lines) < height


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.5, 0.0])
def test_the_panel_bears_odd_losses(loss: float) -> None:
    panel = Panel(watched.info())
    for number in range(1, 5):
        panel.step(watched.step(number, loss=loss), now_s=0.0)
    assert "step 4/40" in shown(panel)


def test_before_the_first_step_the_panel_is_there_already() -> None:
    assert "first step" in shown(Panel(watched.info()))


def test_time_left_counts_evaluation_and_saving() -> None:
    pace = fields.Pace(steps=110)
    pace.seen(10, 100.0)
    assert pace.left_s(2.0) == 200.0
    pace.seen(60, 200.0)
    assert pace.left_s(0.1) == 100.0


def test_the_live_display_tells_a_whole_run_and_gives_the_cursor_back() -> None:
    console = terminal()
    with LiveDisplay(console) as live:
        watched.tell(live, watched.info())
    console.file.seek(0)
    raw = console.file.read()
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1, "cursor hidden once, shown once"
    assert watched.EQUATION in raw and "step 40/40" in raw and "first note" in raw
    assert raw.index("step 40/40") < raw.index("trained 40 of 40 steps")


def test_an_exception_gives_the_cursor_back() -> None:
    console = terminal()
    with pytest.raises(RuntimeError), LiveDisplay(console) as live:
        live.started(watched.info())
        raise RuntimeError
    console.file.seek(0)
    assert console.file.read().endswith("\x1b[?25h")


def test_drawing_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thousand steps of 10 ms, with drawings of 20 ms on a fake clock, drawing takes at most 1%."""
    clock = [0.0]
    drawn = []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    live = LiveDisplay(terminal())
    live.started(watched.info(steps=1000))

    class Slow:
        def refresh(self) -> None:
            clock[0] += 0.02
            drawn.append(clock[0])

        def stop(self) -> None:
            pass

    live.__exit__(None, None, None)
    live._live = Slow()  # type: ignore[assignment]
    for number in range(1, 1001):
        clock[0] += 0.01
        live.stepped(watched.step(number))
    assert 2 <= len(drawn) <= 1 + clock[0] / (0.02 / display.SHARE)


def test_the_chooser_wants_a_terminal_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose(terminal()), LiveDisplay)
    assert isinstance(choose(Console(file=io.StringIO())), PlainDisplay)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert isinstance(choose(Console(file=ascii_only, force_terminal=True)), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose(Console(file=sys.stdout, force_terminal=True)), PlainDisplay)


@pytest.fixture(autouse=True)
def a_good_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    yield


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        console = terminal()
        console.print(panel_after(5))
        console.file.seek(0)
        return console.file.read()

    assert "\x1b[36m" in drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in drawn()


def test_the_layout_is_said_where_there_is_one() -> None:
    told = watched.info()
    assert "layout" not in dict(fields.opening(told))
    layout = Layout(tp=2, sp=True, cp=2, pp=2, vp=2, schedule="interleaved", dp_shard=2, zero=1, ep=4)
    rows = dict(fields.opening(replace(told, plan=replace(told.plan, layout=layout))))
    assert rows["layout"] == (
        "16 ranks = dp_shard 2 x cp 2 (ring) x tp 2 (sp) x pp 2 (interleaved, vp 2), ep 4, zero 1"
    )


def test_a_run_that_goes_on_is_smoothed_as_if_it_had_never_stopped() -> None:
    whole, rest = io.StringIO(), io.StringIO()
    watched.tell(PlainDisplay(whole), watched.info(steps=40))
    before = tuple(watched.step(number).loss for number in range(1, 21))
    watched.tell(PlainDisplay(rest), replace(watched.info(steps=40, first_step=20), losses=before))

    def losses(log: io.StringIO) -> list[str]:
        return [line.split(" | ")[1] for line in log.getvalue().splitlines() if "| loss" in line]

    assert losses(rest) == losses(whole)[20:]


def test_a_short_text_is_encoded_in_few_lines() -> None:
    log = io.StringIO()
    display = PlainDisplay(log)
    for done in range(0, 340_001, 10_000):
        display.encoding(done, 340_000)
    assert log.getvalue() == "encoding text: 332.0 KiB of 332.0 KiB\n"


def test_what_is_encoded_is_counted_in_its_own_unit() -> None:
    """Rows are counted as rows, texts in suitable units of bytes."""
    for rows, whole, last in (
        (True, 57, "encoding rows: 57 of 57"),
        (False, 2**22, "encoding text: 4.00 MiB of 4.00 MiB"),
    ):
        log = io.StringIO()
        display = PlainDisplay(log, rows=rows)
        for part in range(41):
            display.encoding(whole * part // 40, whole)
        lines = log.getvalue().splitlines()
        assert lines[-1] == last and len(lines) == len(set(lines)) <= 12


def test_a_batch_that_grows_is_shown_with_each_step() -> None:
    info = watched.info()
    recipe = replace(info.plan.recipe, batch_ramp=(BatchStage(tokens=10_000, global_batch=64),))
    growing = replace(info, plan=replace(info.plan, recipe=recipe))
    assert fields.extras(watched.step(8), growing) == [("batch", str(watched.step(8).global_batch))]


def test_a_skipped_step_says_why_and_how_many_there_were() -> None:
    told = replace(watched.step(7), skipped="spike", skipped_steps=3)
    assert fields.extras(told, watched.info()) == [("skipped", "(spike, 3 so far)")]
    assert fields.extras(watched.step(8), watched.info()) == []
    panel = panel_after(20, noise_scale_tokens=12_345.0, balance_loss=1.02, loss_scale=65536.0)
    panel.step(replace(watched.step(21), skipped="non-finite", skipped_steps=4), now_s=21.0)
    assert "non-finite" in shown(panel)
