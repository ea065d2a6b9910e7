"""The output of ``ftd plan``, its image and its HTML page, from values made by hand."""

import io
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from ftd.errors import ConfigurationError
from ftd.observe.view.pages.plan_page import render_plan_page
from ftd.observe.view.plan import MAX_STAGES, MAX_TEMPLATES, format_elapsed, render_plan
from ftd.observe.view.plots import plan_plot
from ftd.observe.view.plots.plan_plot import draw_plan, plot_plan
from planner.crosscheck import CrossCheck
from planner.describe import Description, PipelineRow, StageRow, TemplateRow
from planner.errors import SolverError
from planner.timeline import timeline
from planner.values import Policy
from tests.helpers.timelines import idle_ms

MIB = 1 << 20


def template(nodes: int, stages: int = 2, **changes: object) -> TemplateRow:
    rows = tuple(
        StageRow(
            first_layer=4 * index,
            end_layer=4 * index + 4,
            node_offset=index * nodes // stages,
            devices=1,
            recompute="none",
            within="replicate",
            replicas=1,
            memory_bytes=18 * MIB - index,
            undivided_bytes=0,
            forward_ms=40.0,
            backward_ms=80.0 if index else 40.0,
        )
        for index in range(stages)
    )
    found = TemplateRow(
        nodes=nodes,
        objective_ms=600.0,
        lower_bound_ms=600.0,
        proved_optimal=True,
        microbatches=8,
        memory_bytes=18 * MIB,
        stages=rows,
        link_ms=(0.5,) * (stages - 1),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def pipeline(nodes: int, *, count: int = 1, microbatches: int = 8) -> PipelineRow:
    return PipelineRow(
        count=count,
        nodes=nodes,
        microbatches=microbatches,
        memory_bytes=18 * MIB,
        makespan_ms=1081.0,
        sync_ms=10.0,
        bubble_ratio=0.107,
    )


def described() -> Description:
    gap = {"objective_ms": 550.0, "lower_bound_ms": 500.0, "proved_optimal": False}
    return Description(
        policy=Policy(global_batch=32, microbatch_rows=4),
        nodes=6,
        idle_nodes=1,
        layers=8,
        memory_limit_bytes=64 * MIB,
        templates=(template(2), template(3, **gap)),
        pipelines=(pipeline(3), pipeline(2, count=2, microbatches=5)),
        iteration_ms=1091.0,
        samples_per_s=50.0,
    )


def printed(description: Description, width: int = 100, **more: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render_plan(description, planning_s=0.0123, **more))  # type: ignore[arg-type]
    return out.getvalue()


def cells(line: str) -> list[str]:
    return line.split()


def rows_of(page: str) -> list[list[str]]:
    return [cells(line) for line in page.splitlines()]


def checked(model_score_ms: float) -> CrossCheck:
    return CrossCheck(
        microbatches=(5, 3),
        score_ms=640.0,
        model_microbatches=(4, 4),
        model_score_ms=model_score_ms,
        iteration_ms=640.0,
    )


def test_the_page() -> None:
    page = printed(described())
    rows = rows_of(page)
    assert cells("2 2 2×1 8 600.0 ms proved 18.0 MiB ◂") in rows
    assert cells("3 2 2×1 8 550.0 ms 10.00% 18.0 MiB ◂") in rows
    assert cells("A 3 8 1.081 s 10.00 ms 1.091 s 10.7% 18.0 MiB") in rows
    assert cells("1 0–3 1 40.00 ms 40.00 ms ██████▋ 67% 18.0 MiB 28%") in rows
    assert cells("2 4–7 1 40.00 ms 80.00 ms ██████████ 100% 18.0 MiB 28%") in rows
    assert "8 layers, 1 device a node, a device has 64.0 MiB, iteration objective" in page
    assert "planned in 0.0123 s; shares of the batch by the exact method" in page
    assert "3 pipelines for 6 nodes, 1 of them idle" in page
    assert "expected step 1.091 s, 50 samples/s; global batch 32 as 8 microbatches of 4" in page
    assert "paper" not in page and "integer program" not in page


def test_a_plan_of_less_than_a_sample_in_a_second_shows_its_rate() -> None:
    slow = replace(described(), samples_per_s=0.31)
    assert "0.31 samples/s" in printed(slow)
    page = render_plan_page(slow, "<svg></svg>", name="slow", other=None)
    assert '<b>0.31</b><span class="faint">samples/s' in page


def test_the_output_names_the_solver_of_the_batch_shares() -> None:
    description = described()
    page = printed(
        replace(description, policy=msgspec.structs.replace(description.policy, batch_solver="pyomo"))
    )
    assert "shares of the batch by an integer program (Pyomo, HiGHS)" in page


@pytest.mark.parametrize(
    ("iteration_ms", "sentence"),
    [
        (1091.0 * 1.083, "the paper's plan would take 8.30% longer"),
        (1091.0 * 0.99, "the paper's plan would take 1.00% less"),
        (1091.0 * 1.00006, "the paper's plan would take 0.01% longer"),
        (1091.0 * 1.00004, "the paper's plan would take the same time"),
        (1091.0, "the paper's plan would take the same time"),
    ],
)
def test_objectives_are_compared(iteration_ms: float, sentence: str) -> None:
    description = described()
    other = replace(
        description,
        policy=msgspec.structs.replace(description.policy, objective="paper"),
        iteration_ms=iteration_ms,
    )
    page = printed(description, other=other)
    assert sentence in page
    assert cells("iteration 1.091 s 10.7% 1 of 3 nodes (2 stages), 2 of 2 nodes (2 stages) ◂ chosen") in (
        rows_of(page)
    )


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (checked(640.0), "checked against the integer program (Pyomo): equal"),
        (checked(600.0), "it finds 600 ms instead of 640 ms with 4, 4 microbatches; this is a bug"),
        (SolverError("HiGHS is gone"), "not checked against the integer program: HiGHS is gone"),
    ],
)
def test_the_output_ends_with_the_check_of_the_batch_shares(
    check: CrossCheck | SolverError, sentence: str
) -> None:
    page = " ".join(printed(described(), check=check).split())
    assert sentence in page
    assert page.index("batch distribution") > page.index("expected step")


def test_deep_pipelines_and_many_templates_are_abridged() -> None:
    description = described()
    many = tuple(template(nodes, stages=3 * nodes) for nodes in range(1, 101))
    page = printed(replace(description, templates=many, pipelines=(pipeline(100), pipeline(50))))
    assert len(page.splitlines()) < MAX_TEMPLATES + 2 * MAX_STAGES + 30
    assert next(r for r in rows_of(page) if r[:1] == ["100"])[:3] == ["100", "300", "300×1"]
    assert any(row[:2] == ["50", "150"] for row in rows_of(page))
    assert "76 more nodes" in page and "26 more nodes" in page and "slowest stage" in page


def test_eighty_columns_truncate_no_number() -> None:
    page = printed(described(), width=80)
    assert max(map(len, page.splitlines())) <= 80
    rows = rows_of(page)
    assert cells("A 3 8 1.081 s 10.00 ms 1.091 s 10.7% 18.0 MiB") in rows
    assert cells("1 0–3 1 40.00 ms 40.00 ms ██████▋ 67% 18.0 MiB 28%") in rows


@pytest.mark.parametrize(
    ("value_ms", "shown"),
    [
        (0.0, "0 ms"),
        (1e-7, "0.1 ns"),
        (0.25, "250.0 µs"),
        (98.72, "98.72 ms"),
        (999.96, "1000. ms"),
        (1606.4, "1.606 s"),
        (9_999_499, "9999 s"),
        (9_999_960, "10,000 s"),
        (123_456_789, "123,457 s"),
    ],
)
def test_times_have_four_digits(value_ms: float, shown: str) -> None:
    assert format_elapsed(value_ms) == shown.replace("1000. ms", "1000 ms")


def test_every_operation_is_drawn_at_its_time() -> None:
    description = replace(described(), pipelines=(pipeline(2, count=2),))
    figure = draw_plan(description, name="x")
    axes, memory = figure.axes
    drawn = timeline([40.0, 40.0], [40.0, 80.0], [0.5], 8)
    boxes = [
        path.get_extents().bounds
        for collection in axes.collections
        for path in collection.get_paths()
    ]  # fmt: skip
    assert len(boxes) == 2 * 2 * 8
    starts = sorted((x / 1, round(y + 0.42)) for x, y, _, _ in boxes)
    expected = [
        (start, stage)
        for array in (drawn.forward_start_ms, drawn.backward_start_ms)
        for stage, row in enumerate(array)
        for start in row.tolist()
    ]
    assert np.allclose(starts, sorted(expected))
    assert axes.get_title(loc="left").startswith("A × 2   2 nodes, 2 stages, 8 microbatches, 1.091 s")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layers 0–3", "layers 4–7"]
    assert axes.get_xlabel() == "time within a step [ms]" and axes.get_xlim() == (0, 1091.0)
    assert [bar.get_width() for bar in memory.patches] == pytest.approx([64, 64, 18, 18])
    assert memory.get_xlabel() == "memory of a device [MiB]"


def test_too_many_operations_are_drawn_as_mixed_colours() -> None:
    description = described()
    row = replace(
        pipeline(2, microbatches=3000), makespan_ms=timeline([40, 40], [40, 80], [0.5], 3000).makespan_ms
    )
    figure = draw_plan(replace(description, pipelines=(row,)), name="x")
    axes = figure.axes[0]
    (image,) = axes.get_images()
    pixels = np.asarray(image.get_array())
    assert not axes.collections
    waits = 1 - pixels[:, :, 3].reshape(2, -1, pixels.shape[1])[:, 5, :].mean(axis=1) / 255
    drawn = timeline([40.0, 40.0], [40.0, 80.0], [0.5], 3000)
    assert waits == pytest.approx(idle_ms(drawn) / drawn.makespan_ms, abs=0.01)
    description = replace(description, pipelines=(replace(row, microbatches=2_000_000),))
    with pytest.raises(
        ConfigurationError, match=r"--plot: 2000000 microbatches .* at most 1000000 a pipeline"
    ):
        draw_plan(description, name="x")


def test_a_profile_without_sizes_has_no_memory_panel() -> None:
    description = described()
    empty = tuple(replace(p, memory_bytes=0) for p in description.pipelines)
    assert len(draw_plan(replace(description, pipelines=empty), name="x").axes) == 2
    assert len(draw_plan(description, name="x").axes) == 4


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_files_of_each_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"plan.{kind}"
    description = described()
    other = replace(
        description,
        policy=msgspec.structs.replace(description.policy, objective="paper"),
        iteration_ms=2182.0,
    )
    plot_plan(description, path, name="a<b>&c", other=other)
    raw = path.read_bytes()
    if kind == "png":
        assert raw.startswith(b"\x89PNG")
        return
    text = raw.decode()
    assert "a&lt;b&gt;&amp;c" in text and "a<b>" not in text
    if kind == "svg":
        assert ElementTree.fromstring(text).tag.endswith("svg")
        plot_plan(description, path, name="a<b>&c", other=other)
        assert path.read_text() == text
        return
    assert text.startswith("<!doctype html>") and "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", text.replace("xlink:", ""))
    assert "The paper&#x27;s plan would take 100.00% longer: 1 of 3 nodes" in text
    assert "10.00%" in text and "1.091 s" in text and "0–3" in text
    for colour in (plan_plot.INK, plan_plot.WAITING, plan_plot.PAPER):
        assert colour not in text.split("</style>", 1)[1]


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--plot: .* cannot be written"):
        plot_plan(described(), tmp_path / "no" / "plan.svg", name="x")
