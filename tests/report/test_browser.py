"""The report in a real browser, where there is one: its script runs and heeds.

What cannot be seen without eyes, how it looks, is not tested.
"""

import json
import re
import shutil
import subprocess

import pytest
import run_builder

from diloco.report import html

_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

# Does what a reader does, and tells what there is to be seen.
_READER = """
<script>
onerror = (error) => { document.title = JSON.stringify({error}); };
const svgs = () => [...document.querySelectorAll(".place > svg")];
const told = {charts: svgs().length};
{
  const words = (n) => [...svgs()[n].querySelectorAll("text")]
    .map((t) => t.textContent).join(" ");
  const lines = () => svgs()[1].querySelectorAll(".line").length;
  const point = (n, type, at) => {
    const box = svgs()[n].getBoundingClientRect();
    svgs()[n].dispatchEvent(new PointerEvent(type, {pointerType: "touch",
      clientX: box.left + at * box.width, clientY: box.top + box.height / 2}));
  };
  const tips = () => [...document.querySelectorAll(".tip")]
    .filter((tip) => !tip.hidden).map((tip) => tip.innerText).join(" ");
  told.lines = [lines()];
  document.querySelectorAll(".legend")[1].querySelector("button").click();
  told.lines.push(lines());
  point(1, "pointermove", 0.7);
  told.tip = tips();
  const axes = () => [0, 2, 3].map(words);
  const whole = axes();
  point(3, "pointerdown", 0.4);
  point(3, "pointermove", 0.6);
  point(3, "pointerup", 0.6);
  told.zoomed = axes().map((text, i) => text !== whole[i]);
  svgs()[3].dispatchEvent(new MouseEvent("dblclick"));
  told.back = JSON.stringify(axes()) === JSON.stringify(whole);
  const across = () => svgs()[0].viewBox.baseVal.width;
  told.paper = [across()];
  dispatchEvent(new Event("beforeprint"));
  told.paper.push(across());
  dispatchEvent(new Event("afterprint"));
  told.paper.push(across());
  told.wide = document.documentElement.scrollWidth - window.innerWidth;
}
document.title = JSON.stringify(told);
</script>
"""


@pytest.mark.skipif(not _BROWSER, reason="no Chromium here")
@pytest.mark.parametrize("width", [500, 1280])
def test_reader_can_look_closer(tmp_path, width):
  plan = run_builder.Plan(secs=8.0, faults=((1, 4.0),))
  run_dir = run_builder.simulate(tmp_path / "run", plan)
  page = html.write_report(run_dir)
  page.write_text(page.read_text() + _READER)
  result = subprocess.run(
    [
      *(str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
      *(f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"),
      *(f"--window-size={width},900", page.as_uri()),
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  (title,) = re.findall(r"<title>(.*?)</title>", result.stdout)
  told = json.loads(title.replace("&amp;", "&"))
  assert told["charts"] == 9
  assert told["lines"] == [3, 2]  # two islands and the global parameters
  assert "island 1: " in told["tip"] and "island 0: " not in told["tip"]
  # All charts over time together, and no other.
  assert told["zoomed"] == [False, True, True]
  assert told["back"]
  screen, paper, again = told["paper"]
  assert paper == 680 and screen == again != paper
  assert told["wide"] <= 0  # nothing to scroll sideways
