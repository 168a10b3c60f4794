"""Timelines as pages, pictures and trace events."""

import json
import re
import shutil
import subprocess

import pytest
from trace_runs import recording

from ds_fold.__main__ import main
from ds_fold.events import Event, Timeline
from ds_fold.trace import TraceError, write
from ds_fold.trace.files import assemble, messages, save

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def timelines():
    return [assemble([recording(rank, P=2, D=2, v=v, bytes={"SA0": 96}) for rank in range(4)]) for v in (1, 2)]


def test_trace_events(timelines, tmp_path):
    write(timelines, str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    assert len(boxes) == sum(len(timeline.events) for timeline in timelines)
    assert {e["pid"] for e in boxes} == set(range(8))  # a process per rank of each timeline
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    threads = {}
    for e in boxes:
        assert names[e["pid"], e["tid"]] == e["cat"]
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    assert any(e["args"]["bytes"] == 96 for e in boxes)

    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert set(starts) == set(ends) and len(starts) == sum(len(messages(timeline)) for timeline in timelines) > 0
    at = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in boxes}
    for key, start in starts.items():
        end = ends[key]
        sent, received = at[start["pid"], start["tid"], start["ts"]], at[end["pid"], end["tid"], end["ts"]]
        assert start["ts"] <= end["ts"] and (sent[:2], received[:2]) in (("SA", "RA"), ("SG", "RG"))
        assert sent.split(".")[1] == received.split(".")[1] and start["pid"] % 2 == end["pid"] % 2  # one replica


def test_picture(timelines, tmp_path):
    write(timelines, str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_page_holds_all_and_asks_for_nothing(timelines, tmp_path):
    title = "</script><script>alert(1)</script>"
    write([timelines[0]._replace(title=title), timelines[1]], str(tmp_path / "t.html"))
    page = (tmp_path / "t.html").read_text()
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert page.count("</script>") == 2
    data = json.loads(re.search(r'type="application/json">(.*)</script>', page)[1])
    assert [len(t["boxes"]) for t in data["timelines"]] == [len(t.events) for t in timelines]
    assert data["timelines"][0]["title"] == title


#: drives the page as a person would, and leaves what it found in the title
DRIVER = """
<script>
  const found = [], canvas = document.querySelectorAll("canvas")[1], fire = (type, kind, x, y, more) =>
    canvas.dispatchEvent(new kind(type, { clientX: canvas.getBoundingClientRect().left + x, bubbles: true, cancelable: true,
      clientY: canvas.getBoundingClientRect().top + y, ...more }));
  const look = () => found.push([view.start, view.end]);
  const at = t => LEFT + (t - view.start) * (canvas.clientWidth - LEFT) / (view.end - view.start);
  const painted = () => [...document.querySelectorAll("canvas")].map(c =>
    c.getContext("2d").getImageData(0, 0, c.width, c.height).data.filter(x => x).length);
  look();
  found.push(painted());
  fire("pointermove", PointerEvent, at(1.5), ROW + 3);
  found.push(tip.style.display + " " + tip.textContent);
  fire("wheel", WheelEvent, at(1), 5, { deltaY: -500 });
  look();
  fire("pointerdown", PointerEvent, 300, 5);
  fire("pointermove", PointerEvent, 200, 5);
  fire("pointerup", PointerEvent, 200, 5);
  look();
  fire("dblclick", MouseEvent, 200, 5);
  look();
  document.title = JSON.stringify(found);
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_page_in_a_browser(tmp_path):
    short = Timeline("1", 1, 1, 1, 1, [Event(0, "compute", "B0.0", 0, 0.004)], [0, 0.004])
    long = Timeline("2", 2, 1, 1, 1, [Event(0, "compute", "F0.0", 0, 0.001), Event(1, "compute", "F0.0", 0.001, 0.002),
                                      Event(0, "compute", "B0.0", 0.005, 0.008)], [0, 0.008])
    write([short, long], str(tmp_path / "t.html"))
    page = (tmp_path / "t.html").read_text()
    (tmp_path / "t.html").write_text(page.replace("</body>", DRIVER + "</body>"))
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
                           "--window-size=1000,600", "--dump-dom", (tmp_path / "t.html").as_uri()],
                          capture_output=True, text=True, timeout=240)
    title = re.search(r"<title>(\[.*\])</title>", done.stdout)
    assert title, done.stdout[-2000:] + done.stderr[-2000:]
    whole, painted, hovered, zoomed, moved, reset = json.loads(title[1])
    assert whole == [0, 8] and min(painted) > 1000
    assert hovered == "block F0.0: forward\nrank 1, segment 0, micro-batch 0\n1.000 ms, from 1.00000"
    assert zoomed[0] == pytest.approx(1 - 0.4724 * 1, abs=0.01) and zoomed[1] == pytest.approx(1 + 0.4724 * 7, abs=0.01)
    assert moved[0] > zoomed[0] and moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert reset == whole


def test_command_draws_two_runs_on_one_axis(tmp_path, capsys):
    for name in "ab":
        for rank in range(2):
            save(recording(rank, run=name), str(tmp_path / name))
    (tmp_path / "b" / "rank1.json").unlink()
    assert main(["trace", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "pair.json"), "--steps", "3:4"]) == 0
    out, err = capsys.readouterr()
    assert "step 3: " in out and "step 4" not in out and f"drawn to {tmp_path / 'pair.json'}" in out
    assert err.startswith("warning: ") and err.count("\n") == 1 and "no trace of rank 1" in err
    events = json.loads((tmp_path / "pair.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}


@pytest.mark.parametrize("arguments,message", [
    (["none"], "there is no folder 'none'"),
    ([".", "--steps", "6:3"], "--steps 6:3: expected A:B with A < B"),
    ([".", "--steps", "3"], "--steps 3: expected A:B"),
])
def test_command_refuses_with_one_message(arguments, message, capsys):
    assert main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_write_refuses(timelines, tmp_path):
    with pytest.raises(TraceError, match=r"ends with '.svg'; use one of .html, .png, .json"):
        write(timelines, str(tmp_path / "t.svg"))
    with pytest.raises(TraceError, match="no timeline"):
        write([], str(tmp_path / "t.png"))
