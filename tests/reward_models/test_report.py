import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from reward_models import LocationNormalizer, rewardbench_scores
from reward_models.report import build_report, main
from reward_models.report_runs import find_runs
from reward_models.report_views import FEATURED

HOSTILE = '</span><script>alert("x")</script><img src=x onerror=alert(1)> & "quoted" \'single\''


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def scored(response, rewards, *, prompt="How long do eggs take?", faults=(), **extra):
    """A row of scores.jsonl with equal segments of the given normalized rewards."""
    cuts = [round(i * len(response) / len(rewards)) for i in range(len(rewards) + 1)]
    segments = [
        {
            "text": response[a:b],
            "start": a,
            "end": b,
            "tokens": 3,
            "reward": 2 * z,
            "normalized": z,
            "location": (i + 1) / len(rewards),
        }
        for i, (a, b, z) in enumerate(zip(cuts[:-1], cuts[1:], rewards, strict=True))
    ]
    return {
        "id": "pair-1",
        "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": prompt}],
        "response": response,
        "score": sum(rewards) / len(rewards),
        "segments": segments,
        "faults": [{"start": s, "end": e, "kind": k} for s, e, k in faults],
        **extra,
    }


@pytest.fixture
def demo(tmp_path):
    """A demo's directory with every file a report knows, hostile text in many places."""
    root = tmp_path / "demo"
    pair = [
        scored("Six minutes in boiling water.", [0.4, 1.2], side="chosen"),
        scored("Six minutes. You are a fool.", [0.5, 0.1, -2.2], faults=[(13, 28, "rude_remark")], side="rejected"),
    ]
    lines(root / "scores/scores.jsonl", [*pair, scored(HOSTILE, [0.0, 0.3, -0.3], prompt=HOSTILE, id="h")])
    pairs = [
        {"id": i, "subset": name, "score_chosen": float(i % 3), "score_rejected": 0.5}
        for name in ("hep-go", "donotanswer", HOSTILE)
        for i in range(9)
    ]
    longer = rewardbench_scores([row | {"score_chosen": 2, "score_rejected": 1} for row in pairs])
    results = {"benchmark": "rewardbench", **rewardbench_scores(pairs), "length_baseline": longer}
    bench = root / "rewardbench"
    lines(bench / "scores.jsonl", pairs)
    (bench / "results.json").write_text(json.dumps(results))
    (root / "reward_model").mkdir()
    LocationNormalizer.from_parameters(0.7668, 0.2569, 0.4705, 2.8339, rule="entropy>1.75").save(
        root / "reward_model/normalizer.json"
    )
    lines(
        root / "reward_model/metrics.jsonl",
        [{"loss": 0.7 - s / 100, "learning_rate": 1e-4, "step": s} for s in range(5)]
        + [{"eval_loss": 0.6, "eval_accuracy": 0.5 + s / 100, "step": s} for s in (2, 4)],
    )
    steps = [{"step": s, "reward/score": s / 10, "kl/k1": s / 100, f"x/{HOSTILE}": s} for s in range(4)]
    lines(root / "policy/metrics.jsonl", [{**steps[0], "eval/score": 0.1}, *steps[1:], {"step": 4, "eval/score": 0.5}])
    lines(
        root / "policy/samples.jsonl",
        [{**scored(f"Answer at step {s}.", [0.1, s / 4]), "step": s} for s in (0, 2, 4)],
    )
    run = {"command": "demo", "config": {"scale": "tiny", "note": HOSTILE, "flag": True}, "versions": {"torch": "2"}}
    (root / "run.json").write_text(json.dumps({**run, "started": "2025-11-30T04:00:00"}))
    headline = [
        {"label": "Pair accuracy", "value": 0.725, "low": 0.64, "high": 0.8, "note": "longer answer wins 49 %"},
        {"label": "Policy score, after - before", "value": 0.2, "low": -0.1, "high": 0.5, "note": HOSTILE},
    ]
    summary = {"headline": headline, "stages": [{"name": "ppo", "seconds": 75.4}], "model": "tiny", "scale": "tiny"}
    (root / "summary.json").write_text(json.dumps(summary))
    return root


class _Page(HTMLParser):
    """Tags with their attributes and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(demo, tmp_path):
    return build_report([demo], tmp_path / "out/report.html").read_text(encoding="utf-8")


def test_every_part_is_there(page):
    for anchor in ("answers", "location", "benchmark", "policy", "training", "run"):
        assert f'<section id="{anchor}">' in page and f'href="#{anchor}"' in page
    text = " ".join("".join(_Page(page).text).split())
    assert "Pair accuracy 72 % 64 % to 80 %" in text
    assert "1 min 15 s" in text  # a stage's seconds
    assert "mean(p) = 0.767 ln p + 0.47;" in text
    assert "✓ chosen scores higher" in text
    assert "rude remark: its segment has the lowest reward of 3" in text
    assert "started 2025-11-30 04:00" in text


def test_hostile_text_is_shown_and_never_becomes_markup(page):
    parsed = _Page(page)
    assert {tag for tag, _ in parsed.tags} & {"script", "img", "iframe", "object", "form"} == set()
    assert not [key for _, attributes in parsed.tags for key in attributes if key.startswith("on")]
    assert "".join(parsed.text).count('<script>alert("x")</script>') >= 5  # prompt, answer, subset, setting, curve


def test_nothing_is_fetched_from_anywhere(page):
    for tag, attributes in _Page(page).tags:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
    assert not re.search(r"url\(|@import|//cdn|https?://", page)
    assert "default-src 'none'" in page


def test_segments_rebuild_the_response_with_its_colours_and_faults(page):
    rejected = page[page.index("<b>rejected</b>") :]
    body = rejected[rejected.index('<div class="text">') :]
    body = body[: body.index("</div>")]
    assert html.unescape(re.sub("<[^>]*>", "", body)) == "Six minutes. You are a fool."
    assert [m for m in re.findall(r'class="seg (\w+)"', body)] == ["p1", "z0", "n4"]  # z = 0.5, 0.1, -2.2
    assert re.findall(r'<u title="marked error: rude remark">(.*?)</u>', body) == ["You ar", "e a fool."]
    assert 'data-z="−2.2"' in body and "normalized −2.2" in body


def test_a_summary_is_not_needed_for_the_headline(demo, tmp_path):
    (demo / "summary.json").unlink()
    text = "".join(_Page(build_report([demo], tmp_path / "r.html").read_text()).text)
    assert "rewardbench accuracy" in text
    assert "Mean reward in marked errors" in text
    assert "Score change by PPO" in text and "0.1 before, 0.5 after" in text


def test_a_benchmark_of_plain_pairs_has_no_sections_to_miss(tmp_path):
    pairs = [{"id": i, "subset": "all", "score_chosen": float(i), "score_rejected": 1.5} for i in range(4)]
    longer = rewardbench_scores([row | {"score_chosen": 2, "score_rejected": 1} for row in pairs])
    results = {"benchmark": "pairs", **rewardbench_scores(pairs), "length_baseline": longer}
    results["settings"] = {"subset_label": "rebuilt"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.json").write_text(json.dumps(results))
    text = " ".join("".join(_Page(build_report([tmp_path / "run"], tmp_path / "r.html").read_text()).text).split())
    assert "pairs accuracy 50 % 15 % to 85 %" in text  # Wilson, 2 of 4
    assert "longer answer wins: 100 %" in text
    assert "all (rebuilt)" in text and "Not in these data" not in text


def test_damaged_files_cost_a_note_and_no_more(demo, tmp_path):
    (demo / "summary.json").write_text("{")
    (demo / "reward_model/normalizer.json").write_text('{"w_mu": 1}')
    (demo / "rewardbench/results.json").write_text("[1, 2]")
    with (demo / "policy/metrics.jsonl").open("a") as file:
        file.write('[]\n\n{"step": 5, "reward/sc')
    page = build_report([demo], tmp_path / "r.html").read_text()
    text = "".join(_Page(page).text)
    assert text.count("could not be read") == 2
    assert "it holds no JSON object" in text
    assert "policy/metrics.jsonl: 2 unreadable line(s) passed over (6, 8)" in text
    assert 'id="policy"' in page and 'id="location"' not in page


@pytest.mark.parametrize("junk", [None, 3, "text", [], [1], {"a": 1}, math.nan, True])
def test_odd_values_anywhere_do_not_stop_the_page(tmp_path, junk):
    root = tmp_path / "odd"
    row = {name: junk for name in ("id", "prompt", "response", "score", "segments", "faults", "side", "step")}
    segment = {name: junk for name in ("text", "start", "end", "tokens", "reward", "normalized", "location")}
    lines(root / "scores.jsonl", [row, {**row, "response": "abc", "segments": [segment, junk], "faults": [segment]}])
    lines(root / "samples.jsonl", [row, {**row, "response": "abc", "segments": [segment]}])
    lines(
        root / "metrics.jsonl",
        [{"step": junk, "loss": junk, "reward/score": junk}, {"reward/score": 1.0, "kl/k1": junk}],
    )
    names = ("subsets", "sections", "overall", "missing", "pooled", "length_baseline", "benchmark")
    (root / "results.json").write_text(json.dumps({name: junk for name in names}))
    (root / "results.json").write_text(
        json.dumps({**dict.fromkeys(names, junk), "subsets": {"a": {"accuracy": junk, "n": 1}}})
    )
    tile = {"label": junk, "value": junk, "low": junk, "high": 1}
    (root / "summary.json").write_text(
        json.dumps({"headline": [tile, junk], "stages": [{"seconds": junk}], "model": junk})
    )
    (root / "run.json").write_text(json.dumps({"command": junk, "config": junk, "versions": junk, "started": junk}))
    assert build_report([root], tmp_path / "r.html").is_file()


def test_answers_are_chosen_by_fault_kind_and_length_not_by_result(tmp_path):
    rows = []
    for i in range(20):
        kind = "rude" if i % 2 else "wrong_fact"
        text = "word " * (10 + i)
        rows.append(scored(text, [0.0, -1.0, 1.0, 0.2], faults=[(0, 4, kind)], id=f"q{i}", prompt=f"prompt {i:02d}."))
    lines(tmp_path / "run/scores.jsonl", rows)
    page = build_report([tmp_path / "run"], tmp_path / "r.html").read_text()
    for row in rows:  # turn all results around
        for segment in row["segments"]:
            segment["normalized"] *= -1
    lines(tmp_path / "run/scores.jsonl", rows)
    turned = build_report([tmp_path / "run"], tmp_path / "r.html").read_text()
    order = re.findall(r"prompt (\d\d)\.", page)
    assert order[:FEATURED] == ["00", "01", "02", "03", "04", "05", "06", "07"]
    assert re.findall(r"prompt (\d\d)\.", turned) == order
    assert page.count("12 more") == 1


def test_raw_rewards_are_coloured_where_there_is_no_normalizer(tmp_path):
    row = scored("aabb", [1.0, -1.0])
    for segment in row["segments"]:
        segment["normalized"] = None
    lines(tmp_path / "run/scores.jsonl", [row])
    page = build_report([tmp_path / "run"], tmp_path / "r.html").read_text()
    assert 'class="seg p2"' in page and 'class="seg n2"' in page  # ±2 about a mean of 0 with spread 2
    assert "no normalizer" in page


def test_runs_are_found_one_level_down_and_named(demo):
    assert [run.name for run in find_runs([demo])] == [
        "demo",
        "demo/policy",
        "demo/reward_model",
        "demo/rewardbench",
        "demo/scores",
    ]


def test_nothing_to_show_and_no_directory_are_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no file that a report can show.*--output_dir"):
        build_report([tmp_path / "empty"], tmp_path / "r.html")
    with pytest.raises(FileNotFoundError, match="absent: no such directory"):
        build_report([tmp_path / "absent"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_directory_of_an_unknown_kind_is_said_beside_those_that_are_shown(demo, tmp_path, capsys):
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/notes.txt").write_text("?")
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "run.json").write_text(json.dumps({"command": "probe", "config": {}}))
    answers = shutil.copytree(probe, tmp_path / "answers")
    (answers / "run.json").write_text(json.dumps({"command": "generate", "config": {}}))
    (answers / "metadata.json").write_text("{}")
    places = [str(place) for place in (tmp_path / "strange", probe, answers, demo)]
    main(["--run_dirs", *places, "--output_file", str(tmp_path / "r.html")])
    text, said = "".join(_Page((tmp_path / "r.html").read_text()).text), capsys.readouterr().out
    for shown in (text, said):
        assert "strange: no file that a report can show" in shown
        assert "only the settings of `segrew probe` are shown; it has written no result yet" in shown
        assert "of `segrew generate` are shown; it has finished, but what it wrote, metadata.json and" in shown


def test_score_files_are_compared_and_equal_names_told_apart(tmp_path):
    for model, z in (("a", 0.4), ("b", -1.0)):
        lines(tmp_path / model / "scores.jsonl", [scored("Six minutes.", [z], side="chosen")])
    files = [tmp_path / model / "scores.jsonl" for model in "ab"]
    text = "".join(_Page(build_report(files, tmp_path / "r.html").read_text()).text)
    assert all(f"chosen · {file}" in text for file in files)
    lines(tmp_path / "c/scores.jsonl", [{"id": 1, "score_chosen": 1.0}])
    assert (
        "no line of it has a response" in build_report([tmp_path / "c/scores.jsonl"], tmp_path / "r.html").read_text()
    )


def test_units_without_rewards_and_pairs_scored_as_a_whole_are_answers_too(tmp_path):
    units = [{"text": "ab", "start": 0, "end": 2, "tokens": 1}, {"text": "cd", "start": 2, "end": 4, "tokens": 2}]
    lines(tmp_path / "cut/segments.jsonl", [{"id": "p", "side": "chosen", "units": units}])
    pair = {"id": "p", "prompt": "Why?", "chosen": "c", "rejected": "r", "score_chosen": 1.0, "score_rejected": 2.0}
    lines(tmp_path / "rm/scored_pairs/step-000010.jsonl", [pair])
    lines(tmp_path / "rm/scored_pairs/step-000002.jsonl", [pair | {"score_rejected": 0.0}])
    cut, trained = find_runs([tmp_path / "cut", tmp_path / "rm"])
    assert cut.answers[0]["response"] == "abcd" and len(cut.answers[0]["segments"]) == 2
    assert [(row["side"], row["score"]) for row in trained.answers] == [("chosen", 1.0), ("rejected", 2.0)]  # newest
    text = "".join(_Page(build_report([tmp_path / "cut", tmp_path / "rm"], tmp_path / "r.html").read_text()).text)
    assert "✗ rejected scores higher" in text and "no rewards of segments" in text


def test_only_a_report_is_overwritten(demo, tmp_path):
    target = tmp_path / "notes.html"
    target.write_text("my notes")
    with pytest.raises(FileExistsError, match="not a segrew report"):
        build_report([demo], target)
    assert target.read_text() == "my notes"
    with pytest.raises(FileExistsError, match="is a directory"):
        build_report([demo], tmp_path)
    build_report([demo], tmp_path / "r.html")
    build_report([demo], tmp_path / "r.html")
    assert sorted(path.name for path in tmp_path.glob("*.html*")) == ["notes.html", "r.html"]


def test_command_line(demo, tmp_path, capsys):
    main(["--run_dirs", str(demo), str(demo / "policy"), "--output_file", str(tmp_path / "r.html")])
    assert str(tmp_path / "r.html") in capsys.readouterr().out
    with pytest.raises(ValueError, match="--run_dirs is empty"):
        main(["--output_file", str(tmp_path / "r.html")])


CHROMIUM = next(
    (
        found
        for name in (
            "chromium",
            "chromium-browser",
            "google-chrome",
            "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
            "/Applications/Chromium.app/Contents/MacOS/Chromium",
        )
        if (found := shutil.which(name))
    ),
    None,
)
BROWSER_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A frame has the width it is given, where a headless window has a least one; all that is folded is opened.
FRAME = """<!doctype html><iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{
  const view = document.querySelector("iframe"), inside = view.contentDocument;
  inside.querySelectorAll("details").forEach(d => d.open = true);
  const ask = (selector, name) => getComputedStyle(inside.querySelector(selector), null)[name];
  const lit = [...inside.querySelectorAll(".text .seg")].map(s => getComputedStyle(s).backgroundColor);
  document.body.dataset.found = JSON.stringify({{
    inner: view.contentWindow.innerWidth, scroll: inside.documentElement.scrollWidth,
    colours: new Set(lit).size, transparent: lit.includes("rgba(0, 0, 0, 0)"),
    underline: ask("u", "textDecorationLine"), charts: inside.querySelectorAll("svg").length,
    tallest: Math.max(...[...inside.querySelectorAll("svg")].map(s => s.getBoundingClientRect().height)),
    ink: ask("body", "color"), paper: ask("body", "backgroundColor"),
  }});
}});
</script>"""


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_real_browser_lays_it_out_without_sideways_scrolling(page, tmp_path, width, dark):
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    flags = [*BROWSER_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000"]
    if dark:
        flags.append("--blink-settings=preferredColorScheme=0")
    command = [CHROMIUM, *flags, "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', done.stdout).group(1)))
    assert found["inner"] == width
    assert found["scroll"] <= width
    assert found["charts"] >= 6 and 100 < found["tallest"] < 300
    assert found["colours"] >= 4 and not found["transparent"] and found["underline"] == "underline"
    ink, paper = (sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("ink", "paper"))
    assert ink > paper + 400 if dark else paper > ink + 400
