"""The page: valid, self-contained, readable without colour or script, nothing in it unescaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.intent import Intent
from metainfer.doctor import report
from metainfer.doctor.drawing import BOX_HEIGHT, BOX_WIDTH, drawing
from metainfer.doctor.page import page
from metainfer.doctor.stock.audit import StockRequest
from metainfer.platform import host_text
from metainfer.platform.host_text import SMI_QUERY, HostText

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.txt"))
STOCK = StockRequest("sglang", "--model-path deepseek-ai/DeepSeek-V3.2 --tp 4 --odd <b>")
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Checks nesting as it goes, and keeps what the tests ask for."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.cells: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def fixture(name: str) -> HostText:
    return host_text.read_file(FIXTURES / f"{name}.txt")


def read(body: str) -> Reader:
    reader = Reader()
    reader.feed(body)
    reader.close()
    assert reader.open == []
    return reader


def words(reader: Reader) -> str:
    return " ".join(" ".join(reader.text).split())


def documents() -> list[dict[str, Any]]:
    made: list[Any] = [report.doctor(printed=fixture(name), stock=STOCK) for name in NAMES]
    made.append(report.doctor(Intent(model="random:qwen3-8b", context=4096), "8x-l20"))
    made.append(report.doctor(machine="cpu"))
    made.append(report.doctor(machine=str(FIXTURES / "unknown-card.toml")))
    return made


@pytest.fixture(scope="module")
def pages() -> list[tuple[dict[str, Any], Reader, str]]:
    return [(made, read(body := page(made)), body) for made in documents()]


def test_everything_of_the_document_is_on_the_page(pages: Any) -> None:
    for made, reader, _ in pages:
        shown = words(reader)
        for finding in made["findings"]:
            if finding["id"].startswith("stock."):
                continue
            for key in ("where", "what", "remedy"):
                assert " ".join(finding[key].split()) in shown, finding
        assert made["summary"] in shown
        for row in made.get("audit", {}).get("rows", ()):
            assert row["what"] in shown and row["origin"] in shown
        for row in made["topology"]:
            assert row["name"] in shown


def test_nothing_is_fetched_and_nothing_runs(pages: Any) -> None:
    for _, reader, body in pages:
        assert not reader.all("script") and not reader.all("link") and not reader.all("img")
        for _, attributes in reader.tags:
            assert not any(name.startswith("on") for name in attributes)
            for name in ("src", "href", "action"):
                assert (attributes.get(name) or "#").startswith("#")
        assert (
            "url(" not in body
            and "@import" not in body
            and "http" not in body.replace("http-equiv", "")
        )
        assert "default-src 'none'" in body


def test_a_reader_without_eyes_finds_the_way(pages: Any) -> None:
    for _, reader, body in pages:
        assert reader.all("html")[0]["lang"] == "en" and len(reader.all("h1")) == 1
        levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch(r"h[1-6]", tag)]
        assert levels[0] == 1
        assert all(now - before <= 1 for before, now in pairwise(levels))
        ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in reader.tags:
            for name in (attributes.get("aria-labelledby") or "").split():
                assert name in ids
        assert all(attributes.get("scope") in ("col", "row") for attributes in reader.all("th"))
        assert len(reader.all("caption")) == len(reader.all("table")) > 0
        assert body.count("<main") == 1 and 'href="#main"' in body
        for attributes in reader.all("div"):
            if attributes.get("role") == "region":
                assert attributes["tabindex"] == "0" and attributes["aria-label"]


def test_rows_are_as_long_as_their_heads(pages: Any) -> None:
    for _, _, body in pages:
        for table in re.findall(r"<table.*?</table>", body, re.DOTALL):
            head = table.count('<th scope="col">')
            for row in re.findall(r'<tr><th scope="row">.*?</tr>', table, re.DOTALL):
                assert row.count("<td>") + 1 == head


def test_what_a_machine_says_cannot_break_out() -> None:
    text = fixture("x8-link")
    name = '</title><script>alert("1")</script>&amp;'
    for count in (0, 1):  # every card, or one that then differs
        smi = re.sub(r"(Product Name +: ).*", rf"\g<1>{name}", text.texts[SMI_QUERY], count=count)
        evil = HostText({**text.texts, SMI_QUERY: smi}, text.refused)
        reader = read(page(report.doctor(printed=evil, stock=STOCK)))
        assert not reader.all("script") and name in words(reader)


@pytest.mark.parametrize(
    ("name", "verdict", "line"),
    [
        ("clean-switch", "good", "Nothing that blocks or slows was found."),
        ("x8-link", "slows", "GPU 1 (0000:36:00.0, NVIDIA RTX PRO 6000 Blackwell Server Edition): "
         "its PCIe link runs x8 of x16."),
        ("unreadable", "unknown", "21 things could not be read, and may be wrong: see the notes."),
        ("acs-downstream", "slows", "4 places, from downstream port 0000:17:00.0"),
    ],
)  # fmt: skip
def test_the_first_thing_said_is_why(name: str, verdict: str, line: str) -> None:
    body = page(report.doctor(printed=fixture(name)))
    assert f'<div class="verdict {verdict}">' in body and line in words(read(body))


def test_a_described_machine_claims_no_measurement() -> None:
    shown = words(read(page(report.doctor(machine="8x-l20"))))
    assert "nothing was read off it and nothing was measured" in shown
    assert "proven by comparing bytes" not in shown


def test_a_saved_document_gives_the_same_page() -> None:
    made = report.doctor(printed=fixture("two-sockets"), stock=STOCK)
    assert page(json.loads(json.dumps(made))) == page(made)


# the drawing


def test_bad_links_are_marked_without_colour() -> None:
    made: Any = report.doctor(printed=fixture("x8-link"))
    svg = drawing(made["topology"])
    assert svg.count('class="link bad"') == 1 and "⚠ x8 of" in svg
    assert "GPU 1: NVIDIA RTX PRO 6000 Blackwell Server Edition: x8 of x16" in svg
    assert "stroke-dasharray" in page(made)
    clean: Any = report.doctor(printed=fixture("clean-switch"))
    assert "no faulty link was seen" in drawing(clean["topology"])
    assert 'class="link bad"' not in drawing(clean["topology"])


@pytest.mark.parametrize("name", NAMES)
def test_boxes_do_not_overlap_and_labels_stay_between_levels(name: str) -> None:
    made: Any = report.doctor(printed=fixture(name))
    svg = drawing(made["topology"])
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    boxes = [(float(x), float(y)) for x, y in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"', svg)]
    assert len(boxes) == len(made["topology"])
    for index, (x, y) in enumerate(boxes):
        assert x >= 0 and x + BOX_WIDTH <= width and y >= 0 and y + BOX_HEIGHT <= height
        for other_x, other_y in boxes[index + 1 :]:
            assert abs(x - other_x) >= BOX_WIDTH or abs(y - other_y) >= BOX_HEIGHT
    labels = re.findall(r'<text class="label[^"]*" x="([\d.]+)" y="([\d.]+)">', svg)
    for x, y in labels:  # those beside links, which have no anchor
        assert not any(
            left < float(x) < left + BOX_WIDTH and top < float(y) < top + BOX_HEIGHT
            for left, top in boxes
        )


def test_no_cards_no_drawing() -> None:
    assert drawing([]) == ""
    made: Any = report.doctor(machine="cpu")
    assert made["topology"] == [] and "<svg" not in page(made)


def test_topology_rows_name_a_parent_that_came_before() -> None:
    for name in NAMES:
        made: Any = report.doctor(printed=fixture(name))
        seen = {""}
        for row in made["topology"]:
            assert row["parent"] in seen and set(row) == {
                "id", "kind", "name", "parent", "link", "fault",
            }  # fmt: skip
            seen.add(row["id"])
    made = report.doctor(printed=fixture("acs-root"))
    faults = [row["fault"] for row in made["topology"] if row["kind"] == "gpu"]
    assert faults == ["ACS at 15:01.0"] * 2 + ["ACS at 48:01.0"] * 2


# contrast


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_in_light_and_dark() -> None:
    """WCAG 2.1, success criterion 1.4.3: at least 4.5 to 1."""
    style = (Path(report.__file__).parent / "data" / "page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for part in (light, dark.split("}")[0]):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part))
        for name in ("text", "quiet", "blocker", "slows", "information", "good", "mark"):
            for back in ("back", "panel"):
                pair = sorted((_luminance(colours[name]), _luminance(colours[back])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (name, back)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from metainfer.cli import main

    path = tmp_path / "report.html"
    base = ["doctor", "--host-text", str(FIXTURES / "small-bar.txt")]
    assert main.run([*base, "--html", str(path)]) == 0
    assert f"page: {path}" in capsys.readouterr().out
    assert "256 MiB" in words(read(path.read_text(encoding="utf-8")))
    assert main.run([*base, "--html", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err
