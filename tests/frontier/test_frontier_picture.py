"""The page in a headless Chromium: a picture that shows something; and what is said where there is none."""

import csv
import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baoc.frontier import picture
from baoc.frontier.build import write_frontier
from baoc.frontier.report import main
from tests.support.sweep_jobs import config, error, job, three_families
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_the_page_is_drawn_and_is_not_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from PIL import Image

    monkeypatch.setattr(picture, "TIMEOUT_S", PATIENCE_S)  # a busy machine's browser is many times slower
    three_families(tmp_path)
    assert main([str(tmp_path), "--picture"]) == 0
    assert f"drawn in {tmp_path / 'frontier.png'}" in capsys.readouterr().out.replace("\n", "")
    drawn = Image.open(tmp_path / "frontier.png").convert("RGB")
    assert drawn.size == picture.SIZE
    colours = {colour for _, colour in drawn.getcolors(maxcolors=2**24) or []}
    assert {(0x0B, 0x6B, 0xCB), (0xD1, 0x70, 0x0F), (0x7A, 0x7F, 0x87)} <= colours  # points of all three families


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome", "chrome"])
def test_a_browser_is_found_by_any_of_its_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert picture.find_browser() == str(tmp_path / name)


READER = """
    const heads = () => [...document.querySelectorAll("#points th button")];
    const head = (name) => heads().find((own) => own.textContent.startsWith(name));
    const rows = () => [...document.querySelectorAll("#points tr[data-label]")];
    const labels = () => rows().map((row) => row.dataset.label);
    const column = (at) => rows().map((row) => row.cells[at].textContent);
    const ground = () => getComputedStyle(document.body).backgroundColor;
    const look = () => [ground(), byId("scatter").layout.paper_bgcolor, byId("theme").textContent];
    const seen = () => [labels(), byId("axis").value, byId("query").value, state.sort, state.descending, state.open];
    const take = (hash) => { location.hash = hash; restoreView(); return seen(); };
    const query = async (text) => {
      byId("query").value = text;
      byId("query").dispatchEvent(new Event("input"));
      await wait(300);
      return column(0);
    };
"""
ACTS = {
    "table": """
        told.look = look();
        told.plain = location.hash;
        told.first = column(2);
        head("val/loss").click();
        told.up = [column(2), head("val/loss").parentElement.ariaSort];
        head("val/loss").click();
        told.down = [column(2), head("val/loss").parentElement.ariaSort, document.activeElement.textContent];
        head("val/loss").click();
        told.again = column(2);
        told.words = await query("ADAMW");
        told.compared = await query("val/loss>=0.2 seeds=1 state_share<0.002");
        told.summary = byId("summary").textContent;
        dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
        told.all = column(0).length;
        const [one, two] = document.querySelectorAll("#points tbody tr");
        one.focus();
        one.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown"}));
        told.moved = document.activeElement === two;
        one.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
        told.open = document.querySelector("#points tr.more").textContent;
        told.csv = await (await fetch(saveCsv(view(currentWorkload())).href)).text();
    """,
    "brush": """
        const label = "allocator=random";
        byId("scatter").emit("plotly_selected", {points: [{customdata: label}]});
        const families = byId("scatter").data.filter((own) => own.customdata);
        const drawn = byId("parallel").data[0].line.color.length;
        told.brushed = [labels(), drawn, families.map((own) => own.selectedpoints)];
        byId("all").click();
        told.all = rows().length;
        const loss = byId("parallel").keys.indexOf("quality");
        await Plotly.restyle("parallel", {[`dimensions[${loss}].constraintrange`]: [[0.25, 0.6]]});
        told.ranged = labels();
        byId("all").click();
        byId("scatter").emit("plotly_click", {points: [{customdata: label}]});
        told.clicked = document.querySelector("#points tr.open").dataset.label;
        told.risk = ["exact", "measured: n 8"].map((basis) => {
          currentWorkload().points.forEach((own, at) => { Object.assign(own, {basis, risk: at}); });
          draw();
          return byId("parallel").keys.includes("risk");
        });
    """,
    "address": """
        take("#view");
        byId("axis").value = "peak_mib";
        byId("query").value = "seeds=1";
        document.querySelector("#families input[value=uniform]").checked = false;
        Object.assign(state, {sort: "quality", descending: true});
        draw();
        open("allocator=random");
        told.link = document.querySelector("#points a.open").getAttribute("href");
        told.seen = seen();
        const hash = location.hash;
        told.foreign = take("#sort=-none&axis=none&off=x&kind=x");
        told.again = take(hash);
        told.lists = ["x", '"uniform"', null, '["uniform"]'].map(listOf);
        take("#view");
        const plain = labels();
        currentWorkload().points.forEach((own, at) => { own.ranks = 1; own.interval = null; });
        const same = (key) => { take(`#sort=${key}`); return String(labels()) === String(plain); };
        told.hidden = ["ranks", "-interval"].map(same);
    """,
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """A folder, the body of its page, and what each of ACTS noted, by clicks, keys and words as a reader's.

    A text in it would blank a page whose data were not inert.
    """
    folder = tmp_path_factory.mktemp("page")
    three_families(folder)
    (folder / "random").rename(folder / "random #1?")
    error(folder / "odd", exit_code=4, message="<!--<script")
    acts = "".join(
        f"all.{name} = await (async (told) => {{ {act} return told; }})({{}});" for name, act in ACTS.items()
    )
    body = body_of(folder, act=f"{READER} const all = {{}}; {acts} Object.assign(told, all);")
    return folder, body, told_in(body)


def test_a_figure_offers_a_picture_and_no_cloud(read: tuple[Path, str, dict[str, Any]]):
    shown = re.sub(r"<script.*?</script>", "", read[1], flags=re.DOTALL)
    assert 'data-ready="yes"' in shown and "&lt;!--&lt;script" in shown
    assert 'data-title="Download plot as a PNG"' in shown
    assert "cloud" not in shown.lower()


def test_rows_are_sorted_filtered_and_opened(read: tuple[Path, str, dict[str, Any]]):
    told = read[2]["table"]
    assert told["look"] == [*GROUNDS["light"], "colours: auto"] and told["plain"] == ""
    assert told["first"] == told["again"] == ["0.1500", "0.2000", "0.3000", "0.5000"]
    assert told["up"] == [["0.1500", "0.2000", "0.3000", "0.5000"], "ascending"]
    assert told["down"] == [["0.5000", "0.3000", "0.2000", "0.1500"], "descending", "val/loss ▼"]
    assert told["words"] == ["adamw"] and told["compared"] == ["sign", "random"]
    assert told["summary"].startswith("2 of 4 points") and told["all"] == 4 and told["moved"]
    assert "python run.py" in told["open"] and str(read[0] / "exact_1") in told["open"], "command, folders of all seeds"
    rows = list(csv.DictReader(told["csv"].splitlines()))
    assert [float(row["quality"]) for row in rows] == pytest.approx([0.15, 0.2, 0.3, 0.5])
    assert float(rows[0]["interval"]) == pytest.approx(12.706 * 0.0707 / 2**0.5, rel=1e-3), "Student's, of two seeds"


def test_a_view_is_in_the_address_and_comes_back_from_it(read: tuple[Path, str, dict[str, Any]]):
    folder, _, told = read[0], read[1], read[2]["address"]
    assert told["link"] == (folder / "random #1?").as_uri() + "/"
    assert told["seen"][1:] == ["peak_mib", "seeds=1", "quality", True, "allocator=random"]
    assert len(told["foreign"][0]) == 4 and told["lists"] == [[], [], [], ["uniform"]]
    assert told["hidden"] == [True, True], "a column that is left out sorts nothing"
    assert told["again"] == told["seen"]
    assert str(folder) not in (folder / "frontier.html").read_text(), "it is uploaded"


def test_a_brush_keeps_points_in_figures_and_table(read: tuple[Path, str, dict[str, Any]]):
    told = read[2]["brush"]
    assert told["brushed"] == [["allocator=random"], 1, [[], [], [0]]]
    assert told["all"] == 4
    assert told["ranged"] == ["allocator=random", "allocator=uniform_adamw"] and told["clicked"] == "allocator=random"
    assert told["risk"] == [True, False], "it decided nothing where all were measured"


def test_a_page_in_a_frame_stays_there(tmp_path: Path):
    """As W&B and notebooks show it: an address of its own would load another page."""
    three_families(tmp_path)
    told = acted(
        tmp_path,
        """
        byId("query").value = "seeds=1";
        draw();
        open("allocator=random");
        await wait(500);
        told.rows = document.querySelectorAll("#points tr[data-label]").length;
        told.shown = document.querySelector("#points tr.more dl").lastChild.textContent;
        """,
        framed=True,
    )
    assert told == {"rows": 3, "shown": "randomcopy"}


def test_a_study_tells_which_settings_matter(tmp_path: Path):
    """A learning rate that decides, and betas that do not."""
    for number in range(24):
        made = config(seed=0, budget="state_50", allocator="exact")
        made["optim"] = {"lr": 1e-4 * 1.3**number, "betas": [0.9, (0.95, 0.99)[number % 2]]}
        job(tmp_path / str(number), loss=abs(number - 8), settings=made)
    told = acted(
        tmp_path,
        """
        byId("importance").scrollIntoView();
        await wait(500);
        const [{x, y}] = byId("importance").data;
        Object.assign(told, {x, y, row: document.querySelector("#points td").textContent});
        """,
    )
    assert told["y"] == ["optim.betas", "optim.lr"] and told["x"][1] > 90
    assert told["row"] == "betas [0.9,0.95] lr 0.0008157"


GROUNDS = {"light": ["rgb(255, 255, 255)", "#fff"], "dark": ["rgb(20, 23, 26)", "#14171a"]}


def test_colours_are_the_systems_or_the_readers(tmp_path: Path):
    """Here the system's are dark; above they are light."""
    three_families(tmp_path)
    told = acted(
        tmp_path,
        """
        told.looks = [look()];
        for (const _ of [1, 2]) { byId("theme").click(); await wait(50); told.looks.push(look()); }
        """,
        "--blink-settings=preferredColorScheme=0",
    )
    looks = [("auto", "dark"), ("light", "light"), ("dark", "dark")]
    assert told["looks"] == [[*GROUNDS[own], f"colours: {name}"] for name, own in looks]


def acted(folder: Path, act: str, *flags: str, framed: bool = False) -> dict[str, Any]:
    """What a script that acts as a reader notes in `told`, in a Chromium."""
    return told_in(body_of(folder, *flags, act=READER + act, framed=framed))


def told_in(body: str) -> dict[str, Any]:
    found = re.search(r'<pre id="told">(.*?)</pre>', body, re.DOTALL)
    assert found is not None, "the script failed"
    told = json.loads(html.unescape(found[1]))
    assert "error" not in told, told["error"]
    return told


def body_of(folder: Path, *flags: str, act: str, framed: bool = False) -> str:
    """The body of the folder's page after `act`, a script, as a Chromium has it; or of one that has it in a frame."""
    write_frontier(folder, show=False)
    script = f"""<script>(async () => {{
        const told = {{}}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
        await wait(500);
        try {{ {act} }} catch (error) {{ told.error = String(error.stack); }}
        const note = element("pre", {{id: "told", textContent: JSON.stringify(told)}});
        (window === top ? document : top.document).body.append(note);
    }})();</script></body>"""
    page, text = folder / "acted.html", (folder / "frontier.html").read_text().replace("</body>", script)
    frame = f'<body><iframe width="1400" height="3000" srcdoc="{html.escape(text)}"></iframe></body>'
    page.write_text(frame if framed else text)
    program = picture.find_browser()
    assert program is not None, "this test needs a Chromium"
    command = [program, "--headless=new", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--no-sandbox"]
    command += ["--window-size=1400,4000", "--virtual-time-budget=10000", *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.stdout[done.stdout.rindex("<body") :]


def test_without_a_browser_the_page_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    three_families(tmp_path)
    monkeypatch.setattr(picture, "BROWSERS", ())
    assert main([str(tmp_path), "--picture"]) == 0
    assert "no picture" in capsys.readouterr().out
    assert (tmp_path / "frontier.html").is_file() and not (tmp_path / "frontier.png").exists()
