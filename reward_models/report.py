"""`segrew report`: one self-contained HTML page that shows what a set of runs came to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reward_models import report_curves as curves
from reward_models import report_tables as tables
from reward_models import report_tiles as tiles
from reward_models import report_views as views
from reward_models.charts import number
from reward_models.report_policy import policy_curves
from reward_models.report_runs import RunFiles, find_runs
from segrew.config import arg, parse

_MARK = '<meta name="generator" content="segrew report">'


@dataclass
class ReportConfig:
    """What `segrew report` reads and writes."""

    run_dirs: list[str] = arg(
        [], help="run directories to show, each with its sub-directories one level down, or files of scored answers"
    )
    output_file: str = arg("report.html", help="the page to write; an older report there is replaced")

    def __post_init__(self) -> None:
        if not self.run_dirs:
            raise ValueError("--run_dirs is empty: name at least one run directory, for example runs/demo")


def main(argv: list[str]) -> None:
    """Write the report that the command line asks for and say where it is."""
    (config,) = parse("report", (ReportConfig,), argv)
    runs = find_runs(config.run_dirs)
    print(f"wrote {write_report(runs, config.output_file)}")
    for note in [note for run in runs for note in run.notes]:
        print(f"note: {note}")


def build_report(run_dirs: Sequence[str | Path], output: str | Path) -> Path:
    """Write one HTML page about the runs, with everything it needs inside it.

    Raises:
        FileNotFoundError: a run directory that is not there.
        FileExistsError: `output` is a file that no report made.
        ValueError: nothing to show.
    """
    return write_report(find_runs(run_dirs), output)


def write_report(runs: list[RunFiles], output: str | Path) -> Path:
    """Write the page about runs that are read already; raises FileExistsError as `build_report` does."""
    output = Path(output)
    if output.is_dir():
        raise FileExistsError(f"--output_file {output} is a directory; name a file, for example {output}/report.html")
    if output.is_file() and _MARK not in output.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise FileExistsError(f"--output_file {output} is not a segrew report and is kept; name another file")
    page = _environment().get_template("report.html.jinja").render(**_page(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, output)
    return output


def _page(runs: list[RunFiles]) -> dict[str, Any]:
    """Everything the template shows; a section without content is an empty list."""
    roots = list(dict.fromkeys(run.name.split("/")[0] for run in runs))
    return {
        "mark": _MARK,
        "title": ", ".join(roots[:3]) + (f" and {len(roots) - 3} more" if len(roots) > 3 else ""),
        "names": [run.name for run in runs],
        "facts": tiles.facts(runs),
        "tiles": tiles.tiles(runs),
        "answers": views.answers(runs),
        "units": [chart for run in runs if (chart := curves.unit_lengths(run))],
        "locations": [curves.location(run) for run in runs if run.normalizer is not None],
        "lengths": [chart for run in runs if (chart := curves.length_bias_chart(run))],
        "localisation": [view for run in runs if run.results and (view := tables.localisation(run))],
        "benchmarks": [view for run in runs if run.results and (view := tables.benchmark(run))],
        "training": [curves.training_curves(run) for run in runs if run.training],
        "judged": [view for run in runs if run.judge and (view := tables.judge(run))],
        "policy": policy_curves(runs),
        "samples": [view for run in runs if run.samples and (view := views.samples(run))],
        "stages": [view for run in runs if run.summary and (view := tables.stages(run))],
        "settings": [tables.settings(run) for run in runs if run.run],
        "notes": [note for run in runs for note in run.notes],
    }


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment
