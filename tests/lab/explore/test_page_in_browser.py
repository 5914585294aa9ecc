"""The page as people use it, in a headless Chromium: by mouse, by keyboard, by screen reader, on a phone."""

import dataclasses
import json
from collections.abc import Iterator

import pytest
from explore_browser import CHROMIUM, Browser
from PIL import Image

import kerneq.lab.explore.server as serving
from kerneq.lab.explore import export

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="There is no Chromium here (apt-get install chromium).")
SOLVED = "typeof result !== 'undefined' && result && !running"
CONTRASTS = """(() => {  // of every text with what is behind it, lowest first (WCAG 2)
  const linear = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [red, green, blue] = colour.match(/[0-9.]+/g).map(x => linear(x / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = node => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour !== "rgba(0, 0, 0, 0)" || !node.parentElement ? colour : ground(node.parentElement);
  };
  const holdsText = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  return [...document.body.querySelectorAll("*")].filter(n => n.checkVisibility() && holdsText(n)).map(node => {
    const style = getComputedStyle(node), own = light(node instanceof SVGElement ? style.fill : style.color);
    const pair = [own, light(ground(node))];
    return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), node.textContent.slice(0, 40)];
  }).sort((a, b) => a[0] - b[0]);
})()"""
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def run(run):
    """The run with a class of a hostile name."""
    return dataclasses.replace(
        run, seen=dataclasses.replace(run.seen, classes=(*run.classes[:3], HOSTILE, *run.classes[4:]))
    )


@pytest.fixture
def page(browser, server) -> Iterator[Browser]:
    """The page, with its first picture solved; nothing may be found on the console after the test."""
    browser.events.clear()
    browser.open(server.url)
    browser.wait(SOLVED)
    yield browser
    assert browser.problems() == []


def text(page: Browser, name: str) -> str:
    return page.run(f"$('{name}').textContent")


def test_a_picture_is_chosen_and_its_steps_are_gone_through_by_keyboard_alone(page):
    page.run("document.body.focus()")
    seen = []
    for _ in range(13):  # the radio buttons are one stop
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.name || ''"))
    assert seen == [
        *("picture", "file", "how-said", "solver", "tol", "limit", "width", "reset"),
        *("play", "step", "layer", "layers", ""),  # the last is the summary of the numbers
    ]
    page.run("document.querySelector('#thumbs input').focus()")
    before = text(page, "summary")
    page.press("ArrowRight")
    page.wait(f"{SOLVED} && chosen === '1' && $('summary').textContent !== {json.dumps(before)}")
    page.run("$('step').focus()")
    last = page.run("result.steps")
    assert text(page, "step-said") == f"step {last} of {last}"
    page.press("ArrowLeft")
    assert text(page, "step-said") == f"step {last - 1} of {last}"
    said = page.run("$('step').getAttribute('aria-valuetext')")
    assert said.startswith(f"step {last - 1} of {last}: ") and "residual" in said
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.run("$('play').focus()")
    page.press(" ")
    assert text(page, "play") == "Pause"
    page.wait(f"at === {last} && $('play').textContent === 'Play'")


def test_controls_change_the_solve_and_the_model_s_own_come_back(page):
    own = page.run("JSON.stringify(result.layers.map(l => l.residual))")
    page.run("$('solver').value = 'picard-relaxed'")
    page.run("['input', 'change'].forEach(kind => $('solver').dispatchEvent(new Event(kind)))")
    page.wait(f"{SOLVED} && controls.solver === 'picard-relaxed'")
    for control, key, change in (("tol", "ArrowLeft", "tol < 1e-3"), ("width", "ArrowRight", "width > 1")):
        page.run(f"$('{control}').focus()")
        page.press(key)
        page.wait(f"{SOLVED} && controls.{change}")
    assert page.run("JSON.stringify(result.layers.map(l => l.residual))") != own
    page.run("$('reset').click()")
    page.wait(f"{SOLVED} && JSON.stringify(result.layers.map(l => l.residual)) === {json.dumps(own)}")
    assert text(page, "width-said") == "× 1"


def test_a_dropped_picture_is_solved_and_a_broken_one_gets_a_sentence(page, tmp_path):
    good, bad, large = tmp_path / "good.png", tmp_path / "bad.svg", tmp_path / "large.png"
    Image.new("RGB", (30, 20), "white").save(good)
    bad.write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    with large.open("wb") as file:
        file.truncate(65 * 2**20)
    page.choose("#file", good)
    page.wait(f"{SOLVED} && content && $('problem').hidden")
    assert page.run("document.querySelector('#thumbs :checked')") is None
    for file, words in ((bad, "The picture is not a readable picture"), (large, "more than 64 MB")):
        page.choose("#file", file)
        page.wait(f"!running && $('problem').textContent.includes({json.dumps(words)})")
        assert page.run("$('problem').hidden") is False and page.run("$('problem').getAttribute('role')") == "alert"
    assert page.run("content && content.name") == "good.png", "what is shown is what later settings are about"
    page.run("document.querySelector('#thumbs input').click()")
    page.wait(f"{SOLVED} && $('problem').hidden && document.querySelector('#thumbs :checked').value === '0'")
    page.events[:] = [event for event in page.events if "status of 400" not in json.dumps(event)]  # the broken one's


def test_a_first_solve_that_fails_leaves_a_page_that_goes_on(browser, server, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(serving, "watch", lambda *arguments: 1 / 0)
        browser.open(server.url)
        browser.wait("!running && $('problem').textContent.includes('its terminal says why')")
    assert not browser.run("$('results').checkVisibility() || $('first').checkVisibility()")
    browser.run("document.querySelectorAll('#thumbs input')[1].click()")
    browser.wait(f"{SOLVED} && $('results').checkVisibility() && $('problem').hidden")


def test_a_prediction_is_certified_when_asked_for(page):
    assert "Not asked for yet" in text(page, "certificate")
    page.run("$('certify').click()")
    page.wait("!running && $('certificate').textContent.startsWith('Radius 0.')")


def test_names_of_classes_are_texts(page):
    page.run("document.querySelectorAll('#thumbs input')[3].click()")
    page.wait(f"{SOLVED} && chosen === '3'")
    assert page.run(f"document.body.textContent.includes({json.dumps(HOSTILE)})")
    assert page.run("document.querySelector('img[src=x]')") is None


def test_everything_that_is_used_or_shown_has_a_name_for_a_screen_reader(page):
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named: dict[str, list[str]] = {}
    for node in nodes:
        if not node["ignored"]:
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("radio", "button", "slider", "combobox", "image", "region", "heading", "table"):
        assert role == "table" or all(named[role]), (role, named[role])
    pictures = " | ".join(named["image"])
    assert "mean of 32 channels after step" in pictures and "highest at row" in pictures
    assert "Residual by step, logarithmic. layer 1: " in pictures and "weights ω of the patches" in pictures
    assert len(named["slider"]) == 4 and "status" in named and named["radio"][0] == "Digit 0"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("wide", [1280, 390])
def test_nothing_sticks_out_and_every_text_can_be_read(browser, server, wide, dark):
    browser.open(server.url, wide, 800, dark)
    browser.wait(SOLVED)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 50 and contrasts[0][0] >= 4.5, contrasts[0]


def test_the_exported_page_needs_no_server(browser, run, tmp_path):
    export(run, tmp_path / "demo.html")
    browser.events.clear()
    browser.call("Network.enable")
    browser.open((tmp_path / "demo.html").as_uri())
    browser.wait("result")
    assert not browser.run(
        "$('drop').checkVisibility() || $('sliders').checkVisibility() || $('certify').checkVisibility()"
    )
    first = browser.run("$('summary').textContent + $('certificate').textContent")
    assert "Radius" in first and "picard-relaxed" in browser.run("$('stored').textContent")
    browser.run("document.querySelectorAll('#thumbs input')[2].click()")
    browser.wait(f"$('summary').textContent + $('certificate').textContent !== {json.dumps(first)}")
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert all(url.startswith(("file:", "data:")) for url in asked) and browser.problems() == []
